//! `ApproximateIndex`.

use std::sync::{Mutex, MutexGuard, PoisonError};

use kvrouter_core::approximate;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::buffers::OutColumn;
use crate::checked;
use crate::hashing::Prompt;
use crate::index::secret;

#[pyclass(frozen, get_all, eq, module = "kvrouter._native")]
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct ApproximateStats {
    blocks: usize,
    bytes: usize,
}

#[pymethods]
impl ApproximateStats {
    fn __repr__(&self) -> String {
        format!("ApproximateStats(blocks={}, bytes={})", self.blocks, self.bytes)
    }
}

#[pyclass(frozen, module = "kvrouter._native")]
pub struct ApproximateIndex(Mutex<approximate::ApproximateIndex>);

#[pymethods]
impl ApproximateIndex {
    #[new]
    #[pyo3(signature = (*, ttl_s=120.0, max_blocks=1 << 20, prune_target_ratio=0.8))]
    fn new(
        ttl_s: f64,
        #[pyo3(from_py_with = checked::max_blocks)] max_blocks: usize,
        prune_target_ratio: f64,
    ) -> PyResult<Self> {
        if ttl_s.is_nan() || ttl_s <= 0.0 {
            return Err(PyValueError::new_err(format!("ttl_s: above 0 seconds, not {ttl_s}")));
        }
        if max_blocks == 0 {
            return Err(PyValueError::new_err("max_blocks: at least 1, not 0"));
        }
        if !(0.0..=1.0).contains(&prune_target_ratio) {
            return Err(PyValueError::new_err(format!(
                "prune_target_ratio: within 0..1, not {prune_target_ratio}"
            )));
        }
        let after_prune = (max_blocks as f64 * prune_target_ratio) as usize;
        Ok(ApproximateIndex(Mutex::new(approximate::ApproximateIndex::new(
            ttl_s,
            max_blocks,
            after_prune,
            secret(),
        ))))
    }

    fn touch(
        &self,
        #[pyo3(from_py_with = checked::slot)] slot: u32,
        prompt: &Prompt,
        now_s: f64,
    ) -> PyResult<()> {
        check_now(now_s)?;
        self.lock().touch(slot, prompt.inner.sequence_hashes(), now_s);
        Ok(())
    }

    fn overlap(&self, py: Python<'_>, prompt: &Prompt, out: &Bound<'_, PyAny>, now_s: f64) -> PyResult<()> {
        check_now(now_s)?;
        let mut out = OutColumn::get(out)?;
        let out = out.as_mut_slice(py);
        let index = self.lock();
        if index.overlap(prompt.inner.sequence_hashes(), now_s, out) {
            return Ok(());
        }
        Err(PyValueError::new_err(format!(
            "out: a place for each of the {} slots in use, not {}",
            index.slots_in_use(),
            out.len()
        )))
    }

    fn expire(&self, now_s: f64) -> PyResult<usize> {
        check_now(now_s)?;
        Ok(self.lock().expire(now_s))
    }

    fn drop(&self, #[pyo3(from_py_with = checked::slot)] slot: u32) {
        self.lock().drop_slot(slot);
    }

    fn stats(&self) -> ApproximateStats {
        let index = self.lock();
        ApproximateStats { blocks: index.n_blocks(), bytes: index.bytes() }
    }
}

impl ApproximateIndex {
    /// Nobody gives the interpreter up while holding the index.
    fn lock(&self) -> MutexGuard<'_, approximate::ApproximateIndex> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn check_now(now_s: f64) -> PyResult<()> {
    if now_s.is_finite() {
        return Ok(());
    }
    Err(PyValueError::new_err(format!("now_s: a finite time, not {now_s}")))
}
