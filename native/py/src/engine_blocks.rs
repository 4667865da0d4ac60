//! `EngineBlocks`, and the long lists of an engine's events.

use kvrouter_core::engine_blocks::{self, Store};
use kvrouter_core::engine_lists::{self, Malformed, Others};
use pyo3::buffer::PyBuffer;
use pyo3::exceptions::PyValueError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyBytes, PyList, PyTuple, PyType};

use crate::buffers::with_tokens;
use crate::checked;
use crate::events::{removed, stored};

#[pyclass(module = "kvrouter._native")]
pub struct EngineBlocks(engine_blocks::EngineBlocks);

#[pymethods]
impl EngineBlocks {
    #[new]
    #[pyo3(signature = (*, max_blocks))]
    fn new(#[pyo3(from_py_with = checked::max_blocks)] max_blocks: usize) -> Self {
        EngineBlocks(engine_blocks::EngineBlocks::new(max_blocks))
    }

    fn held(&self, #[pyo3(from_py_with = checked::medium)] medium: usize) -> usize {
        self.0.held(medium)
    }

    fn is_held(&self, name: u64, #[pyo3(from_py_with = checked::medium)] medium: usize) -> bool {
        self.0.is_held(name, medium)
    }

    fn is_known(&self, name: u64) -> bool {
        self.0.is_known(name)
    }

    #[allow(clippy::too_many_arguments)]
    fn store<'py>(
        &mut self,
        names: Vec<u64>,
        parent: Option<u64>,
        tokens: &Bound<'py, PyAny>,
        #[pyo3(from_py_with = checked::block_size)] block_size: usize,
        #[pyo3(from_py_with = checked::medium)] medium: usize,
        lora_name: Option<&str>,
        cache_salt: Option<&str>,
        #[pyo3(from_py_with = checked::mm_hashes)] mm_hashes: Option<Vec<Vec<u64>>>,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        let placed = with_tokens(tokens, |tokens| {
            if Some(tokens.len()) != names.len().checked_mul(block_size) {
                return Err(PyValueError::new_err(format!(
                    "tokens: {block_size} for each of {} names, not {}",
                    names.len(),
                    tokens.len()
                )));
            }
            Ok(self.0.store(&Store {
                names: &names,
                parent,
                tokens,
                block_size,
                medium,
                lora_name: lora_name.unwrap_or_default(),
                cache_salt,
                mm_hashes: mm_hashes.as_deref().unwrap_or_default(),
            }))
        })??;
        event(tokens.py(), &names, medium, placed)
    }

    fn copy<'py>(
        &mut self,
        py: Python<'py>,
        name: u64,
        #[pyo3(from_py_with = checked::medium)] medium: usize,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        let placed = self.0.copy(name, medium);
        event(py, &[name], medium, placed)
    }

    fn remove<'py>(
        &mut self,
        py: Python<'py>,
        names: Vec<u64>,
        medium: Option<Bound<'py, PyAny>>,
    ) -> PyResult<Vec<Bound<'py, PyAny>>> {
        let medium = medium.map(|medium| checked::medium(&medium)).transpose()?;
        let found = self.0.remove(&names, medium);
        found.iter().map(|(medium, names)| removed(py, names, *medium)).collect()
    }

    fn clear(&mut self) {
        self.0.clear();
    }
}

fn event<'py>(
    py: Python<'py>,
    names: &[u64],
    medium: usize,
    placed: Option<engine_blocks::Stored>,
) -> PyResult<Option<Bound<'py, PyAny>>> {
    let named = |placed: engine_blocks::Stored| {
        stored(py, placed.parent, &names[..placed.block_hashes.len()], &placed.block_hashes, medium)
    };
    placed.map(named).transpose()
}

#[pyfunction]
pub fn engine_events<'py>(
    py: Python<'py>,
    list: PyBuffer<u8>,
    events_max: usize,
) -> PyResult<Bound<'py, PyList>> {
    let list = list.to_vec(py)?;
    let events = engine_lists::events(&list, events_max).map_err(refusal)?;
    PyList::new(py, events.iter().map(|event| (event.kind, event.is_array, PyBytes::new(py, event.bytes))))
}

#[pyfunction]
pub fn engine_names<'py>(
    py: Python<'py>,
    list: PyBuffer<u8>,
    names_max: usize,
) -> PyResult<Bound<'py, PyTuple>> {
    PyTuple::new(py, engine_lists::names(&list.to_vec(py)?, names_max).map_err(refusal)?)
}

/// The texts in a list, with their places.
type Texts = Vec<(usize, String)>;

#[pyfunction]
pub fn engine_tokens<'py>(
    py: Python<'py>,
    list: PyBuffer<u8>,
    tokens_max: usize,
    takes_texts: bool,
) -> PyResult<(Bound<'py, PyAny>, Texts)> {
    let list = list.to_vec(py)?;
    let others = if takes_texts { Others::Texts } else { Others::Pairs };
    let tokens = engine_lists::tokens(&list, tokens_max, others).map_err(refusal)?;
    let column = PyBytes::new_with(py, tokens.ids.len() * 4, |bytes| {
        for (chunk, id) in bytes.chunks_exact_mut(4).zip(&tokens.ids) {
            chunk.copy_from_slice(&id.to_ne_bytes());
        }
        Ok(())
    })?;
    static ARRAY: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    let ids = ARRAY.import(py, "array", "array")?.call1((intern!(py, "I"), column))?;
    Ok((ids, tokens.texts.iter().map(|&(at, text)| (at, text.to_owned())).collect()))
}

fn refusal(malformed: Malformed) -> PyErr {
    PyValueError::new_err((malformed.place, malformed.why.into_owned()))
}
