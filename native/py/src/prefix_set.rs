//! `PrefixSet`.

use kvrouter_core::prefix_set;
use pyo3::prelude::*;

use crate::checked;
use crate::hashing::Prompt;

#[pyclass(module = "kvrouter._native")]
pub struct PrefixSet(prefix_set::PrefixSet);

#[pymethods]
impl PrefixSet {
    #[new]
    #[pyo3(signature = (*, max_blocks))]
    fn new(#[pyo3(from_py_with = checked::max_blocks)] max_blocks: usize) -> Self {
        PrefixSet(prefix_set::PrefixSet::new(max_blocks))
    }

    fn add(&mut self, prompt: &Prompt) -> Option<usize> {
        self.0.add(prompt.inner.sequence_hashes())
    }
}
