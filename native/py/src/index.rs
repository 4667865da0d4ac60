//! `BlockIndex`: decoding events, and locking between writers and readers.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use kvrouter_core::index::{self, MEDIA};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::sync::MutexExt;

use crate::buffers::{to_column, OutColumn};
use crate::checked;
use crate::events::{self, Batch, KvEvents};
use crate::hashing::Prompt;

/// A batch with more blocks releases the interpreter lock while it is applied.
const DETACH_BLOCKS: usize = 4096;

/// Blocks that are applied before a waiting reader gets its turn.
const TURN_BLOCKS: usize = 4096;

#[pyclass(frozen, get_all, eq, module = "kvrouter._native")]
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Applied {
    stored: u64,
    repeated: u64,
    replaced: u64,
    removed: u64,
    unknown_removed: u64,
    orphaned: u64,
    cleared: u64,
    over_limit: u64,
}

#[pymethods]
impl Applied {
    fn __repr__(&self) -> String {
        let counts = [
            ("stored", self.stored),
            ("repeated", self.repeated),
            ("replaced", self.replaced),
            ("removed", self.removed),
            ("unknown_removed", self.unknown_removed),
            ("orphaned", self.orphaned),
            ("cleared", self.cleared),
            ("over_limit", self.over_limit),
        ];
        format!("Applied({})", counts.map(|(name, count)| format!("{name}={count}")).join(", "))
    }
}

impl From<index::Applied> for Applied {
    fn from(applied: index::Applied) -> Self {
        let index::Applied {
            stored,
            repeated,
            replaced,
            removed,
            unknown_removed,
            orphaned,
            cleared,
            over_limit,
        } = applied;
        Applied { stored, repeated, replaced, removed, unknown_removed, orphaned, cleared, over_limit }
    }
}

#[pyclass(frozen, get_all, eq, module = "kvrouter._native")]
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct IndexStats {
    blocks: ByMedium,
    sequences: ByMedium,
    ranks: usize,
    bytes: usize,
}

type ByMedium = (usize, usize, usize, usize);

fn by_medium([gpu, cpu, disk, external]: [usize; MEDIA]) -> ByMedium {
    (gpu, cpu, disk, external)
}

#[pymethods]
impl IndexStats {
    fn __repr__(&self) -> String {
        format!(
            "IndexStats(blocks={:?}, sequences={:?}, ranks={}, bytes={})",
            self.blocks, self.sequences, self.ranks, self.bytes
        )
    }
}

#[pyclass(frozen, module = "kvrouter._native")]
pub struct BlockIndex {
    index: Mutex<index::BlockIndex>,
    n_waiting: AtomicUsize,
}

#[pymethods]
impl BlockIndex {
    #[new]
    #[pyo3(signature = (*, blocks_per_rank_max=1 << 26))]
    fn new(
        #[pyo3(from_py_with = checked::blocks_per_rank_max)] blocks_per_rank_max: usize,
    ) -> PyResult<Self> {
        if blocks_per_rank_max == 0 {
            return Err(PyValueError::new_err("blocks_per_rank_max: at least 1, not 0"));
        }
        let index = index::BlockIndex::new(blocks_per_rank_max, secret());
        Ok(BlockIndex { index: Mutex::new(index), n_waiting: AtomicUsize::new(0) })
    }

    fn apply(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = checked::slot)] slot: u32,
        events: &Bound<'_, PyAny>,
    ) -> PyResult<Applied> {
        if let Ok(ready) = events.cast::<KvEvents>() {
            return Ok(self.apply_batch(py, slot, &ready.get().0).into());
        }
        let batch = events::decode(events)?;
        Ok(self.apply_batch(py, slot, &batch).into())
    }

    fn dump<'py>(
        &self,
        py: Python<'py>,
        #[pyo3(from_py_with = checked::slot)] slot: u32,
    ) -> PyResult<Vec<Bound<'py, PyAny>>> {
        let columns = py.detach(|| self.wait().dump(slot));
        let mut held = Vec::new();
        for column in &columns {
            extend_held(py, &mut held, column)?;
        }
        Ok(held)
    }

    #[pyo3(signature = (slot, place=0))]
    fn dump_some<'py>(
        &self,
        py: Python<'py>,
        #[pyo3(from_py_with = checked::slot)] slot: u32,
        #[pyo3(from_py_with = checked::place)] place: u64,
    ) -> PyResult<Option<(Vec<Bound<'py, PyAny>>, u64)>> {
        let Some((column, next)) = self.lock(py).dump_some(slot, place) else { return Ok(None) };
        let mut held = Vec::new();
        extend_held(py, &mut held, &column)?;
        Ok(Some((held, next)))
    }

    fn drop_some(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = checked::slot)] slot: u32,
    ) -> PyResult<Applied> {
        let cleared = self.lock(py).drop_some(slot) as u64;
        Ok(index::Applied { cleared, ..index::Applied::default() }.into())
    }

    #[pyo3(signature = (prompt, out, medium=0))]
    fn overlap(
        &self,
        py: Python<'_>,
        prompt: &Prompt,
        out: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = checked::medium)] medium: usize,
    ) -> PyResult<()> {
        let mut out = OutColumn::get(out)?;
        let index = self.lock(py);
        let out = out.as_mut_slice(py);
        if index.overlap(prompt.inner.sequence_hashes(), medium, out) {
            return Ok(());
        }
        Err(PyValueError::new_err(format!(
            "out: a place for each of the {} slots in use, not {}",
            index.slots_in_use(medium),
            out.len()
        )))
    }

    #[pyo3(signature = (slot, medium=0))]
    fn held(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = checked::slot)] slot: u32,
        #[pyo3(from_py_with = checked::medium)] medium: usize,
    ) -> usize {
        self.lock(py).held(slot, medium)
    }

    fn stats(&self, py: Python<'_>) -> IndexStats {
        let index::IndexStats { blocks, sequences, ranks, bytes } = self.lock(py).stats();
        IndexStats { blocks: by_medium(blocks), sequences: by_medium(sequences), ranks, bytes }
    }
}

impl BlockIndex {
    /// The index; the interpreter is given up only if somebody else has it.
    fn lock(&self, py: Python<'_>) -> MutexGuard<'_, index::BlockIndex> {
        self.n_waiting.fetch_add(1, Ordering::Relaxed);
        let index = self.index.lock_py_attached(py).unwrap_or_else(PoisonError::into_inner);
        self.n_waiting.fetch_sub(1, Ordering::Relaxed);
        index
    }

    /// The index, for a thread that is not attached to the interpreter.
    fn wait(&self) -> MutexGuard<'_, index::BlockIndex> {
        self.n_waiting.fetch_add(1, Ordering::Relaxed);
        let index = self.index.lock().unwrap_or_else(PoisonError::into_inner);
        self.n_waiting.fetch_sub(1, Ordering::Relaxed);
        index
    }

    fn apply_batch(&self, py: Python<'_>, slot: u32, batch: &Batch) -> index::Applied {
        let mut applied = index::Applied::default();
        if batch.n_blocks() <= DETACH_BLOCKS {
            let mut index = self.lock(py);
            batch.events().for_each(|event| index.apply(slot, &event, &mut applied));
            return applied;
        }
        py.detach(|| {
            let mut n_blocks = 0;
            let mut index = self.wait();
            for event in batch.events() {
                n_blocks += event.n_blocks();
                index.apply(slot, &event, &mut applied);
                if n_blocks >= TURN_BLOCKS && self.n_waiting.load(Ordering::Relaxed) > 0 {
                    n_blocks = 0;
                    drop(index);
                    std::thread::yield_now();
                    index = self.wait();
                }
            }
            applied
        })
    }
}

/// Appends a column as events that are short enough to be applied in one turn.
fn extend_held<'py>(
    py: Python<'py>,
    held: &mut Vec<Bound<'py, PyAny>>,
    column: &index::HeldColumns,
) -> PyResult<()> {
    let chunks = column.engine_hashes.chunks(events::HELD_BLOCKS_MAX);
    for (names, sequences) in chunks.zip(column.sequence_hashes.chunks(events::HELD_BLOCKS_MAX)) {
        held.push(events::held(to_column(py, names)?, to_column(py, sequences)?, column.medium)?);
    }
    Ok(())
}

/// A number that nobody outside this process can know.
pub fn secret() -> u64 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(0u64)
}
