//! KV events as Python has them (`kvrouter.core.events`) and as the index reads them.

use kvrouter_core::index::{Event, MEDIA};
use kvrouter_core::msgpack::Reader;
use kvrouter_core::paged_kv;
use pyo3::buffer::PyBuffer;
use pyo3::exceptions::{PyIndexError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyBytes, PyIterator, PySlice, PyTuple, PyType};
use pyo3::{intern, Borrowed};

use crate::buffers::{extend_from_column, to_column};
use crate::checked::shown;

/// The most blocks of one event of a snapshot, so that applying it blocks no other call for long.
pub const HELD_BLOCKS_MAX: usize = 4096;

/// Decoded events; their hashes lie in one vector.
#[derive(Default)]
pub struct Batch {
    events: Vec<Decoded>,
    hashes: Vec<u64>,
}

#[derive(Clone, Copy)]
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

    /// The events in a msgpack array, each a map in the order in which workers write its fields; None for any other
    /// bytes, and for a column that is not whole.
    fn read(frame: &[u8]) -> Option<Batch> {
        let mut reader = Reader(frame);
        let mut batch = Batch::default();
        for _ in 0..reader.array()? {
            batch.read_event(&mut reader)?;
        }
        reader.0.is_empty().then_some(batch)
    }

    fn read_event(&mut self, reader: &mut Reader<'_>) -> Option<()> {
        let (mut parent, mut medium, begin) = (None, 0, self.hashes.len());
        let kind = if reader.literal(b"\x85\xa4type\xa6stored\xa6parent").is_some() {
            if reader.literal(b"\xc0").is_none() {
                parent = Some(reader.unsigned()?);
            }
            Kind::Stored
        } else if reader.literal(b"\x83\xa4type\xa7removed").is_some() {
            Kind::Removed
        } else {
            reader.literal(b"\x81\xa4type\xa7cleared")?;
            Kind::Cleared
        };
        let mut n_blocks = 0;
        if !matches!(kind, Kind::Cleared) {
            n_blocks = self.read_column(reader, b"\xadengine_hashes")?;
            if matches!(kind, Kind::Stored) {
                (self.read_column(reader, b"\xacblock_hashes")? == n_blocks).then_some(())?;
            }
            reader.literal(b"\xa6medium")?;
            medium = reader.unsigned().filter(|&medium| medium < MEDIA as u64)? as usize;
        }
        self.events.push(Decoded { kind, parent, medium, begin, n_blocks });
        Some(())
    }

    fn read_column(&mut self, reader: &mut Reader<'_>, name: &[u8]) -> Option<usize> {
        reader.literal(name)?;
        let column = reader.bytes()?;
        extend_from_column(&mut self.hashes, column, "").ok()?;
        Some(column.len() / 8)
    }

    pub fn events(&self) -> impl Iterator<Item = Event<'_>> {
        self.events.iter().map(|event| self.event(event))
    }

    fn picked(&self, numbers: impl Iterator<Item = usize>) -> Batch {
        let mut batch = Batch::default();
        for event in numbers.map(|number| self.events[number]) {
            let n_columns = if matches!(event.kind, Kind::Stored | Kind::Held) { 2 } else { 1 };
            let hashes = &self.hashes[event.begin..event.begin + n_columns * event.n_blocks];
            batch.events.push(Decoded { begin: batch.hashes.len(), ..event });
            batch.hashes.extend_from_slice(hashes);
        }
        batch
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
                let parent = event.getattr(intern!(py, "parent"))?;
                decoded.parent = parent.extract().map_err(|_| {
                    PyValueError::new_err(format!(
                        "parent: an unsigned 64-bit hash or None, not {}",
                        shown(&parent)
                    ))
                })?;
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

/// Events that engines of this process gave, or that a frame held. They become Python objects where somebody looks at
/// them: the index does not.
#[pyclass(frozen, sequence, module = "kvrouter._native")]
pub struct KvEvents(pub Batch);

#[pymethods]
impl KvEvents {
    #[staticmethod]
    fn decode(py: Python<'_>, frame: PyBuffer<u8>) -> PyResult<Option<KvEvents>> {
        Ok(Batch::read(&frame.to_vec(py)?).map(KvEvents))
    }

    #[getter]
    fn n_blocks(&self) -> usize {
        self.0.n_blocks()
    }

    #[getter]
    fn has_cleared(&self) -> bool {
        self.0.events.iter().any(|event| matches!(event.kind, Kind::Cleared))
    }

    fn __eq__(&self, other: &Bound<'_, PyAny>) -> PyResult<bool> {
        let events = self.tuple(other.py())?;
        match other.cast::<KvEvents>() {
            Ok(others) => events.eq(others.get().tuple(other.py())?),
            Err(_) => events.eq(other),
        }
    }

    fn __hash__(&self, py: Python<'_>) -> PyResult<isize> {
        self.tuple(py)?.hash()
    }

    fn __len__(&self) -> usize {
        self.0.events.len()
    }

    fn __getitem__<'py>(&self, at: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let (py, n_events) = (at.py(), self.0.events.len() as isize);
        if let Ok(slice) = at.cast::<PySlice>() {
            let picked = slice.indices(n_events)?;
            let numbers = (0..picked.slicelength).map(|i| (picked.start + i as isize * picked.step) as usize);
            return Ok(Bound::new(py, KvEvents(self.0.picked(numbers)))?.into_any());
        }
        let at = at.extract::<isize>()?;
        let number = if at < 0 { at + n_events } else { at };
        if !(0..n_events).contains(&number) {
            return Err(PyIndexError::new_err(format!("event {at} of {n_events}")));
        }
        self.event(py, number as usize)
    }

    fn __iter__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyIterator>> {
        self.tuple(py)?.try_iter()
    }
}

impl KvEvents {
    fn tuple<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        let events = (0..self.0.events.len()).map(|number| self.event(py, number));
        PyTuple::new(py, events.collect::<PyResult<Vec<_>>>()?)
    }

    /// A `kvrouter.core.events.Stored`, `Removed` or `Cleared`.
    fn event<'py>(&self, py: Python<'py>, number: usize) -> PyResult<Bound<'py, PyAny>> {
        static CLEARED: PyOnceLock<Py<PyType>> = PyOnceLock::new();
        match self.0.event(&self.0.events[number]) {
            Event::Stored { parent, engine_hashes, block_hashes, medium } => {
                stored(py, parent, engine_hashes, block_hashes, medium)
            }
            Event::Removed { engine_hashes, medium } => removed(py, engine_hashes, medium),
            Event::Cleared => CLEARED.import(py, "kvrouter.core.events", "Cleared")?.call0(),
            Event::Held { .. } => unreachable!("neither an engine's memory nor a frame gives one"),
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

/// A `kvrouter.core.events.Stored`.
pub fn stored<'py>(
    py: Python<'py>,
    parent: Option<u64>,
    engine_hashes: &[u64],
    block_hashes: &[u64],
    medium: usize,
) -> PyResult<Bound<'py, PyAny>> {
    static STORED: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    let (names, blocks) = (to_column(py, engine_hashes)?, to_column(py, block_hashes)?);
    let event = (parent, names, blocks, to_medium(py, medium)?);
    STORED.import(py, "kvrouter.core.events", "Stored")?.call1(event)
}

/// A `kvrouter.core.events.Removed`.
pub fn removed<'py>(py: Python<'py>, engine_hashes: &[u64], medium: usize) -> PyResult<Bound<'py, PyAny>> {
    static REMOVED: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    let event = (to_column(py, engine_hashes)?, to_medium(py, medium)?);
    REMOVED.import(py, "kvrouter.core.events", "Removed")?.call1(event)
}

/// A `kvrouter.core.events.Held`.
pub fn held<'py>(
    engine_hashes: Bound<'py, PyBytes>,
    sequence_hashes: Bound<'py, PyBytes>,
    medium: usize,
) -> PyResult<Bound<'py, PyAny>> {
    static HELD: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    let py = engine_hashes.py();
    let medium = to_medium(py, medium)?;
    HELD.import(py, "kvrouter.core.events", "Held")?.call1((engine_hashes, sequence_hashes, medium))
}

/// A `kvrouter.core.events.Medium`.
fn to_medium(py: Python<'_>, medium: usize) -> PyResult<Bound<'_, PyAny>> {
    static MEMBERS: PyOnceLock<Vec<Py<PyAny>>> = PyOnceLock::new();
    let members = MEMBERS.get_or_try_init(py, || {
        let class = py.import("kvrouter.core.events")?.getattr("Medium")?;
        (0..MEDIA).map(|medium| Ok(class.call1((medium,))?.unbind())).collect::<PyResult<Vec<_>>>()
    })?;
    Ok(members[medium].bind(py).clone())
}
