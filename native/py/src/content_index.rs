//! `ContentIndex`.

use kvrouter_core::content_index::{self, OtherName};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::buffers::OutColumn;
use crate::checked;
use crate::events::KvEvents;
use crate::hashing::Prompt;

#[pyclass(module = "kvrouter._native")]
pub struct ContentIndex(content_index::ContentIndex);

#[pymethods]
impl ContentIndex {
    #[new]
    fn new() -> Self {
        ContentIndex(content_index::ContentIndex::default())
    }

    fn apply(
        &mut self,
        #[pyo3(from_py_with = checked::slot)] slot: u32,
        events: &Bound<'_, KvEvents>,
    ) -> PyResult<()> {
        events.get().0.events().try_for_each(|event| self.0.apply(slot, &event)).map_err(|OtherName(name)| {
            PyValueError::new_err(format!("events: block {name} is not named by its content"))
        })
    }

    fn drop_rank(&mut self, #[pyo3(from_py_with = checked::slot)] slot: u32) {
        self.0.drop_rank(slot);
    }

    fn overlap(&self, py: Python<'_>, prompt: &Prompt, out: &Bound<'_, PyAny>) -> PyResult<()> {
        let mut out = OutColumn::get(out)?;
        if self.0.overlap(prompt.inner.sequence_hashes(), out.as_mut_slice(py)) {
            return Ok(());
        }
        Err(PyValueError::new_err("out: a place for each of the slots in use"))
    }
}
