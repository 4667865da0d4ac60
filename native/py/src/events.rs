//! KV events as Python has them (`kvrouter.core.events`) and as the index reads them.

use kvrouter_core::index::{Event, MEDIA};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyBytes, PyType};
use pyo3::{intern, Borrowed};

use crate::buffers::extend_from_column;

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
        self.events.iter().map(|event| {
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
        })
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
