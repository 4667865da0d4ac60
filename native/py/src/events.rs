//! KV events as Python has them (`kvrouter.core.events`) and as the index reads them.

use kvrouter_core::index::{Event, MEDIA};
use kvrouter_core::paged_kv;
use pyo3::exceptions::{PyIndexError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyBytes, PyIterator, PySlice, PyTuple, PyType};
use pyo3::{intern, Borrowed};

use crate::buffers::{extend_from_column, to_column};

/// The most blocks of one event of a snapshot, so that applying it blocks no other call for long.
pub const HELD_BLOCKS_MAX: usize = 4096;

/// Decoded events; their hashes lie in one vector.
#[derive(Default)]
pub struct Batch {
    events: Vec<Decoded>,
    hashes: Vec<u64>,
}

struct Decoded {
    kind: Kind,
    parent: Option<u64>,
    medium: usize,
    /// Where the engine hashes begin in the vector; as many block or sequence hashes follow them if the kind
    /// has any.
    begin: usize,
    n_blocks: usize,
}

#[derive(Clone, Copy)]
enum Kind {
    Stored,
    Removed,
    Cleared,
    Held,
}

impl Batch {
    pub fn n_blocks(&self) -> usize {
        self.events.iter().map(|event| event.n_blocks).sum()
    }

    pub fn events(&self) -> impl Iterator<Item = Event<'_>> {
        self.events.iter().map(|event| self.event(event))
    }

    fn event(&self, event: &Decoded) -> Event<'_> {
        let (middle, medium) = (event.begin + event.n_blocks, event.medium);
        let engine_hashes = &self.hashes[event.begin..middle];
        let second = || &self.hashes[middle..middle + event.n_blocks];
        match event.kind {
            Kind::Stored => {
                Event::Stored { parent: event.parent, engine_hashes, block_hashes: second(), medium }
            }
            Kind::Held => Event::Held { engine_hashes, sequence_hashes: second(), medium },
            Kind::Removed => Event::Removed { engine_hashes, medium },
            Kind::Cleared => Event::Cleared,
        }
    }

    fn push(&mut self, event: &Bound<'_, PyAny>) -> PyResult<()> {
        let py = event.py();
        let kind = match event.getattr(intern!(py, "kind"))?.extract::<u8>()? {
            0 => Kind::Stored,
            1 => Kind::Removed,
            2 => Kind::Cleared,
            3 => Kind::Held,
            other => return Err(PyTypeError::new_err(format!("an event of unknown kind {other}"))),
        };
        let mut decoded = Decoded { kind, parent: None, medium: 0, begin: self.hashes.len(), n_blocks: 0 };
        if !matches!(kind, Kind::Cleared) {
            decoded.medium = medium_of(event)?;
            decoded.n_blocks = self.push_column(event, intern!(py, "engine_hashes"), "engine_hashes")?;
        }
        let second = match kind {
            Kind::Stored => {
                decoded.parent = event.getattr(intern!(py, "parent"))?.extract()?;
                Some(("block_hashes", intern!(py, "block_hashes")))
            }
            Kind::Held => Some(("sequence_hashes", intern!(py, "sequence_hashes"))),
            _ => None,
        };
        if let Some((name, attribute)) = second {
            let n_hashes = self.push_column(event, attribute, name)?;
            if n_hashes != decoded.n_blocks {
                return Err(PyValueError::new_err(format!(
                    "{name}: {} hashes, one for each engine hash, not {n_hashes}",
                    decoded.n_blocks
                )));
            }
        }
        self.events.push(decoded);
        Ok(())
    }

    fn push_column(
        &mut self,
        event: &Bound<'_, PyAny>,
        attribute: &Bound<'_, pyo3::types::PyString>,
        name: &str,
    ) -> PyResult<usize> {
        let before = self.hashes.len();
        let column = event.getattr(attribute)?;
        let bytes: Borrowed<'_, '_, PyBytes> = column.cast::<PyBytes>()?.as_borrowed();
        extend_from_column(&mut self.hashes, bytes.as_bytes(), name)?;
        Ok(self.hashes.len() - before)
    }
}

fn medium_of(event: &Bound<'_, PyAny>) -> PyResult<usize> {
    match event.getattr(intern!(event.py(), "medium"))?.extract::<usize>()? {
        medium if medium < MEDIA => Ok(medium),
        medium => Err(PyValueError::new_err(format!("medium: within 0..{}, not {medium}", MEDIA - 1))),
    }
}

/// Events that engines of this process gave. They become Python objects where somebody looks at them: the
/// index does not.
#[pyclass(frozen, sequence, module = "kvrouter._native")]
pub struct KvEvents(pub Batch);

#[pymethods]
impl KvEvents {
    fn __len__(&self) -> usize {
        self.0.events.len()
    }

    fn __getitem__<'py>(&self, at: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let (py, n_events) = (at.py(), self.0.events.len() as isize);
        if let Ok(slice) = at.cast::<PySlice>() {
            let picked = slice.indices(n_events)?;
            let numbers = (0..picked.slicelength).map(|i| picked.start + i as isize * picked.step);
            let events =
                numbers.map(|number| self.event(py, number as usize)).collect::<PyResult<Vec<_>>>()?;
            return Ok(PyTuple::new(py, events)?.into_any());
        }
        let at = at.extract::<isize>()?;
        let number = if at < 0 { at + n_events } else { at };
        if !(0..n_events).contains(&number) {
            return Err(PyIndexError::new_err(format!("event {at} of {n_events}")));
        }
        self.event(py, number as usize)
    }

    fn __iter__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyIterator>> {
        let events = (0..self.0.events.len()).map(|number| self.event(py, number));
        PyTuple::new(py, events.collect::<PyResult<Vec<_>>>()?)?.try_iter()
    }
}

impl KvEvents {
    /// A `kvrouter.core.events.Stored` or `Removed`.
    fn event<'py>(&self, py: Python<'py>, number: usize) -> PyResult<Bound<'py, PyAny>> {
        static STORED: PyOnceLock<Py<PyType>> = PyOnceLock::new();
        static REMOVED: PyOnceLock<Py<PyType>> = PyOnceLock::new();
        match self.0.event(&self.0.events[number]) {
            Event::Stored { parent, engine_hashes, block_hashes, .. } => {
                let columns = (parent, to_column(py, engine_hashes)?, to_column(py, block_hashes)?);
                STORED.import(py, "kvrouter.core.events", "Stored")?.call1(columns)
            }
            Event::Removed { engine_hashes, .. } => {
                REMOVED.import(py, "kvrouter.core.events", "Removed")?.call1((to_column(py, engine_hashes)?,))
            }
            Event::Cleared | Event::Held { .. } => unreachable!("an engine's memory gives neither"),
        }
    }
}

impl From<Vec<paged_kv::Event>> for KvEvents {
    fn from(events: Vec<paged_kv::Event>) -> Self {
        let mut batch = Batch::default();
        for event in &events {
            let begin = batch.hashes.len();
            let (kind, parent, engine_hashes) = match event {
                paged_kv::Event::Stored { parent, engine_hashes, .. } => {
                    (Kind::Stored, *parent, engine_hashes)
                }
                paged_kv::Event::Removed { engine_hashes } => (Kind::Removed, None, engine_hashes),
            };
            batch.hashes.extend_from_slice(engine_hashes);
            if let paged_kv::Event::Stored { block_hashes, .. } = event {
                batch.hashes.extend_from_slice(block_hashes);
            }
            batch.events.push(Decoded { kind, parent, medium: 0, begin, n_blocks: engine_hashes.len() });
        }
        KvEvents(batch)
    }
}

/// Reads a sequence of KV events; fails before anything is applied.
pub fn decode(events: &Bound<'_, PyAny>) -> PyResult<Batch> {
    let mut batch = Batch::default();
    for event in events.try_iter()? {
        batch.push(&event?)?;
    }
    Ok(batch)
}

/// A `kvrouter.core.events.Held`.
pub fn held<'py>(
    engine_hashes: Bound<'py, PyBytes>,
    sequence_hashes: Bound<'py, PyBytes>,
    medium: usize,
) -> PyResult<Bound<'py, PyAny>> {
    static HELD: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    static MEDIUM: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    let py = engine_hashes.py();
    let medium = MEDIUM.import(py, "kvrouter.core.events", "Medium")?.call1((medium,))?;
    HELD.import(py, "kvrouter.core.events", "Held")?.call1((engine_hashes, sequence_hashes, medium))
}
