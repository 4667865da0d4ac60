//! `PagedKv`.

use std::sync::{Mutex, MutexGuard, PoisonError};

use kvrouter_core::paged_kv::{self, NoRoom};
use pyo3::exceptions::{PyKeyError, PyMemoryError, PyValueError};
use pyo3::prelude::*;

use crate::checked;
use crate::events::KvEvents;

#[pyclass(frozen, subclass, module = "kvrouter._native")]
pub struct PagedKv(Mutex<paged_kv::PagedKv>);

#[pymethods]
impl PagedKv {
    #[new]
    #[pyo3(signature = (*, total_blocks, opaque, seed, caching=true))]
    fn new(
        #[pyo3(from_py_with = checked::total_blocks)] total_blocks: usize,
        opaque: bool,
        #[pyo3(from_py_with = checked::seed)] seed: u64,
        caching: bool,
    ) -> Self {
        PagedKv(Mutex::new(paged_kv::PagedKv::new(total_blocks, opaque, seed, caching)))
    }

    #[getter]
    fn total_blocks(&self) -> usize {
        self.lock().total_blocks()
    }

    #[getter]
    fn free_blocks(&self) -> usize {
        self.lock().free_blocks()
    }

    #[getter]
    fn idle_blocks(&self) -> usize {
        self.lock().idle_blocks()
    }

    #[getter]
    fn active_blocks(&self) -> usize {
        self.lock().active_blocks()
    }

    #[getter]
    fn cached_blocks(&self) -> u64 {
        self.lock().cached_blocks()
    }

    #[getter]
    fn n_offers(&self) -> usize {
        self.lock().n_offers()
    }

    fn matched(&self, block_hashes: &[u8], blocks_max: usize) -> PyResult<usize> {
        Ok(self.lock().matched(hashes(block_hashes)?, blocks_max))
    }

    fn hold(&self, block_hashes: &[u8], n_matched: usize, n_private: usize) -> PyResult<Option<u64>> {
        Ok(self.lock().hold(hashes(block_hashes)?, n_matched, n_private))
    }

    fn can_grow(&self, n_private: usize) -> bool {
        self.lock().can_grow(n_private)
    }

    fn grow(&self, table: u64, n_private: usize) -> PyResult<usize> {
        match self.lock().grow(table, n_private) {
            Ok(Some(n_blocks)) => Ok(n_blocks),
            Ok(None) => Err(not_held(table)),
            Err(NoRoom { wanted, evictable }) => {
                Err(PyMemoryError::new_err(format!("{wanted} blocks wanted, {evictable} can be evicted")))
            }
        }
    }

    fn commit(&self, table: u64, block_hashes: &[u8], n_full: usize) -> PyResult<()> {
        if self.lock().commit(table, hashes(block_hashes)?, n_full) {
            return Ok(());
        }
        Err(PyKeyError::new_err(format!("table {table} does not hold {n_full} blocks that have hashes")))
    }

    fn release(&self, table: u64) -> PyResult<()> {
        if self.lock().release(table) {
            return Ok(());
        }
        Err(not_held(table))
    }

    fn take_events(&self) -> KvEvents {
        self.lock().take_events().into()
    }

    fn snapshot(&self) -> KvEvents {
        self.lock().snapshot().into()
    }

    fn check_integrity(&self, tables: Vec<u64>) -> Vec<String> {
        self.lock().check_integrity(&tables)
    }
}

impl PagedKv {
    /// Nobody gives the interpreter up while holding it.
    fn lock(&self) -> MutexGuard<'_, paged_kv::PagedKv> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn not_held(table: u64) -> PyErr {
    PyKeyError::new_err(format!("table {table} is not held"))
}

fn hashes(column: &[u8]) -> PyResult<impl Iterator<Item = u64> + '_> {
    if column.len() % 8 != 0 {
        return Err(PyValueError::new_err(format!(
            "block_hashes: a column of 8-byte hashes, not {} bytes",
            column.len()
        )));
    }
    Ok(column.chunks_exact(8).map(|chunk| u64::from_le_bytes(chunk.try_into().expect("8 bytes"))))
}
