//! `Prompt` and the hash functions.

use std::sync::Arc;

use kvrouter_core::{hashing as core, prompt};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::buffers::{extend_from_column, to_column, with_tokens};
use crate::checked;

#[pyclass(frozen, module = "kvrouter._native")]
pub struct Prompt {
    pub inner: Arc<prompt::Prompt>,
}

#[pymethods]
impl Prompt {
    #[new]
    #[pyo3(signature = (tokens, *, block_size, seed=core::SEED, mm_hashes=None))]
    fn new(
        tokens: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = checked::block_size)] block_size: usize,
        #[pyo3(from_py_with = checked::seed)] seed: u64,
        #[pyo3(from_py_with = checked::mm_hashes)] mm_hashes: Option<Vec<Vec<u64>>>,
    ) -> PyResult<Self> {
        let mm_hashes = mm_hashes.as_deref();
        let prompt = with_tokens(tokens, |ids| {
            check_mm_hashes(mm_hashes, ids.len() / block_size)?;
            checked::room_for_hashes(ids.len() / block_size * 4, "tokens")?;
            Ok::<_, PyErr>(prompt::Prompt::new(ids, block_size, seed, mm_hashes.unwrap_or_default()))
        })??;
        Ok(Prompt { inner: Arc::new(prompt) })
    }

    #[staticmethod]
    #[pyo3(signature = (block_hashes, *, isl_tokens, block_size))]
    fn from_blocks(
        block_hashes: &[u8],
        #[pyo3(from_py_with = checked::isl_tokens)] isl_tokens: usize,
        #[pyo3(from_py_with = checked::block_size)] block_size: usize,
    ) -> PyResult<Self> {
        let mut hashes = Vec::new();
        extend_from_column(&mut hashes, block_hashes, "block_hashes")?;
        if hashes.len() > isl_tokens / block_size {
            return Err(PyValueError::new_err(format!(
                "isl_tokens: at least the {} blocks of {block_size} tokens, not {isl_tokens}",
                hashes.len()
            )));
        }
        let prompt = prompt::Prompt::from_blocks(hashes, isl_tokens, block_size);
        Ok(Prompt { inner: Arc::new(prompt) })
    }

    #[getter]
    fn isl_tokens(&self) -> usize {
        self.inner.isl_tokens
    }

    #[getter]
    fn block_size(&self) -> usize {
        self.inner.block_size
    }

    #[getter]
    fn n_blocks(&self) -> usize {
        self.inner.n_blocks()
    }

    #[getter]
    fn total_blocks(&self) -> usize {
        self.inner.total_blocks()
    }

    #[getter]
    fn block_hashes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        to_column(py, self.inner.block_hashes())
    }

    #[getter]
    fn sequence_hashes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        to_column(py, self.inner.sequence_hashes())
    }

    fn __repr__(&self) -> String {
        format!(
            "Prompt(isl_tokens={}, block_size={}, n_blocks={})",
            self.inner.isl_tokens,
            self.inner.block_size,
            self.inner.n_blocks()
        )
    }
}

fn check_mm_hashes(mm_hashes: Option<&[Vec<u64>]>, n_blocks: usize) -> PyResult<()> {
    match mm_hashes {
        Some(salts) if salts.len() != n_blocks => Err(PyValueError::new_err(format!(
            "mm_hashes: one entry for each of the {n_blocks} full blocks, not {}",
            salts.len()
        ))),
        _ => Ok(()),
    }
}

#[pyfunction]
pub fn mix64(bits: &Bound<'_, PyAny>) -> PyResult<u64> {
    Ok(core::mix64(low_bits(bits)?))
}

#[pyfunction]
pub fn finish64(bits: &Bound<'_, PyAny>) -> PyResult<u64> {
    Ok(core::finish64(low_bits(bits)?))
}

/// The lowest 64 bits of a whole number of any size.
fn low_bits(number: &Bound<'_, PyAny>) -> PyResult<u64> {
    match number.extract() {
        Ok(bits) => Ok(bits),
        Err(_) => number.bitand(u64::MAX)?.extract(),
    }
}

#[pyfunction]
#[pyo3(signature = (*, lora_name=None, cache_namespace=None))]
pub fn hash_seed(lora_name: Option<&str>, cache_namespace: Option<&str>) -> u64 {
    core::hash_seed(lora_name.unwrap_or_default(), cache_namespace.unwrap_or_default())
}

#[pyfunction]
#[pyo3(signature = (tokens, *, block_size, seed=core::SEED, mm_hashes=None))]
pub fn block_hashes<'py>(
    tokens: &Bound<'py, PyAny>,
    #[pyo3(from_py_with = checked::block_size)] block_size: usize,
    #[pyo3(from_py_with = checked::seed)] seed: u64,
    #[pyo3(from_py_with = checked::mm_hashes)] mm_hashes: Option<Vec<Vec<u64>>>,
) -> PyResult<Bound<'py, PyBytes>> {
    let mm_hashes = mm_hashes.as_deref();
    let hashes = with_tokens(tokens, |ids| {
        check_mm_hashes(mm_hashes, ids.len() / block_size)?;
        checked::room_for_hashes(ids.len() / block_size, "tokens")?;
        Ok::<_, PyErr>(core::block_hashes(ids, block_size, seed, mm_hashes.unwrap_or_default()))
    })??;
    to_column(tokens.py(), &hashes)
}

#[pyfunction]
pub fn sequence_hashes<'py>(py: Python<'py>, block_hashes: &[u8]) -> PyResult<Bound<'py, PyBytes>> {
    let mut hashes = Vec::new();
    extend_from_column(&mut hashes, block_hashes, "block_hashes")?;
    to_column(py, &core::sequence_hashes(&hashes))
}
