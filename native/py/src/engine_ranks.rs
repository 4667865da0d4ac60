//! `EngineRanks`: the schedulers of mock engines. Its methods take it alone (`&mut self`), so that what a leg's content
//! calls back cannot meet it half done: Python gets a RuntimeError then.

use kvrouter_core::hashing::finish64;
use kvrouter_core::ranks::{Handle, Outputs, Ranks};
use kvrouter_core::scheduler::{Config, Scheduler};
use kvrouter_core::sequence::{self, Finish, Submitted};
use kvrouter_core::timing::Timing;
use pyo3::exceptions::{PyKeyError, PyValueError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::buffers::extend_from_column;
use crate::checked;
use crate::events::KvEvents;

/// What sets the names of one leg's own blocks apart.
const STEP: u64 = 0xD134_2543_DE82_EF95;

/// A leg that only its content can go on with, or one whose own blocks have names drawn from a salt.
enum Content {
    Python(Py<PyAny>),
    Salted(u64),
}

impl sequence::Content for Content {
    type Error = PyErr;

    fn hash_blocks(&mut self, known: usize, n_blocks: usize, hashes: &mut Vec<u64>) -> PyResult<()> {
        match self {
            Content::Salted(salt) => {
                hashes.extend(
                    (known..n_blocks).map(|at| finish64(salt.wrapping_add((at as u64).wrapping_mul(STEP)))),
                );
                Ok(())
            }
            Content::Python(content) => Python::attach(|py| {
                let column = content.bind(py).call_method1(intern!(py, "hash_blocks"), (known, n_blocks))?;
                extend_from_column(hashes, column.cast::<PyBytes>()?.as_bytes(), "hash_blocks")?;
                if hashes.len() < n_blocks {
                    let message = format!("hash_blocks: {} of {n_blocks} hashes", hashes.len());
                    return Err(PyValueError::new_err(message));
                }
                Ok(())
            }),
        }
    }

    fn stops(&mut self, n_output: u64) -> PyResult<bool> {
        match self {
            Content::Salted(_) => Ok(false),
            Content::Python(content) => Python::attach(|py| {
                content.bind(py).call_method1(intern!(py, "stops"), (n_output,))?.extract()
            }),
        }
    }
}

type LoadRow = (usize, u64, usize, usize);
type ChunkRow = (u64, u64, Option<u64>, u8);
type OutputRow = (u32, Option<KvEvents>, Option<LoadRow>, Vec<ChunkRow>, Vec<(u64, f64)>);
type EndedRow = (u64, f64, f64, u64, u64);

#[pyclass(subclass, module = "kvrouter._native")]
#[derive(Default)]
pub struct EngineRanks(Ranks<Content>);

#[pymethods]
impl EngineRanks {
    #[new]
    fn new() -> Self {
        EngineRanks::default()
    }

    #[pyo3(signature = (
        *, block_size, total_blocks, seqs_max, tokens_max, chunked_prefill, plans_ahead, prefix_caching, opaque, seed,
        timing, leaps
    ))]
    #[allow(clippy::too_many_arguments)] // they are named by who calls
    fn add(
        &mut self,
        #[pyo3(from_py_with = checked::block_size)] block_size: usize,
        #[pyo3(from_py_with = checked::total_blocks)] total_blocks: usize,
        seqs_max: usize,
        tokens_max: u64,
        chunked_prefill: bool,
        plans_ahead: bool,
        prefix_caching: bool,
        opaque: bool,
        #[pyo3(from_py_with = checked::seed)] seed: u64,
        timing: [f64; 11],
        leaps: bool,
    ) -> PyResult<u32> {
        if total_blocks == 0 || seqs_max == 0 || tokens_max == 0 {
            return Err(PyValueError::new_err("total_blocks, seqs_max, tokens_max: at least 1"));
        }
        Ok(self.0.add(Config {
            block_size: block_size as u64,
            total_blocks,
            seqs_max,
            tokens_max: tokens_max.min(checked::TOKENS_MAX),
            chunked_prefill,
            plans_ahead,
            prefix_caching,
            opaque,
            seed,
            timing: Timing::from(timing),
            leaps,
        }))
    }

    fn remove(&mut self, rank: u32) -> PyResult<()> {
        if self.0.remove(rank) {
            return Ok(());
        }
        Err(no_rank(rank))
    }

    #[pyo3(signature = (
        now, rank, *, block_hashes, prompt_tokens, max_tokens, credit_tokens, may_stop, remote_tokens, pins_kv,
        content=None, salt=0
    ))]
    #[allow(clippy::too_many_arguments)] // they are named by who calls
    fn submit(
        &mut self,
        now: f64,
        rank: u32,
        block_hashes: &[u8],
        #[pyo3(from_py_with = checked::n_tokens)] prompt_tokens: u64,
        #[pyo3(from_py_with = checked::n_tokens)] max_tokens: u64,
        credit_tokens: i64,
        may_stop: bool,
        remote_tokens: u64,
        pins_kv: bool,
        content: Option<Py<PyAny>>,
        salt: u64,
    ) -> PyResult<u64> {
        let mut hashes = Vec::new();
        extend_from_column(&mut hashes, block_hashes, "block_hashes")?;
        let submitted = Submitted {
            content: content.map_or(Content::Salted(salt), Content::Python),
            hashes,
            prompt_tokens,
            max_tokens,
            credit_tokens,
            may_stop,
            remote_tokens,
            pins_kv,
        };
        let handle = self.0.submit(now, rank, submitted).ok_or_else(|| no_rank(rank))??;
        Ok(to_number(handle.rank, handle.slot))
    }

    fn drop(&mut self, now: f64, sequence: u64) -> PyResult<()> {
        self.change(sequence, |scheduler, slot| scheduler.drop_sequence(now, slot))
    }

    fn release(&mut self, now: f64, sequence: u64) -> PyResult<()> {
        self.change(sequence, |scheduler, slot| scheduler.release(now, slot))
    }

    fn give_credit(&mut self, now: f64, sequence: u64, tokens: i64) -> PyResult<()> {
        self.change(sequence, |scheduler, slot| scheduler.give_credit(now, slot, tokens))
    }

    fn receive(&mut self, now: f64, sequence: u64, arrived: bool) -> PyResult<()> {
        self.change(sequence, |scheduler, slot| scheduler.receive(now, slot, arrived))
    }

    fn catch_up(&mut self, now: f64, rank: u32) -> PyResult<()> {
        self.0
            .change(rank, |scheduler| {
                scheduler.catch_up(now)?;
                scheduler.report_pending();
                Ok(())
            })
            .ok_or_else(|| no_rank(rank))?
    }

    fn next_time(&mut self) -> Option<f64> {
        self.0.next_time()
    }

    #[pyo3(signature = (until, *, through))]
    fn run(&mut self, until: f64, through: bool) -> PyResult<Option<f64>> {
        self.0.run(until, through)
    }

    fn take_notices(&mut self) -> (Vec<EndedRow>, Vec<(u64, u64)>) {
        let notices = self.0.take_notices();
        let ended = notices.ended.into_iter().map(|(rank, ended)| {
            let number = to_number(rank, ended.slot);
            (number, ended.first_s, ended.last_s, ended.output_tokens, ended.cached_tokens)
        });
        let wanting = notices
            .wanting
            .into_iter()
            .map(|(rank, wanting)| (to_number(rank, wanting.slot), wanting.kv_tokens));
        (ended.collect(), wanting.collect())
    }

    #[getter]
    fn has_outputs(&self) -> bool {
        self.0.has_outputs()
    }

    #[pyo3(signature = (*, with_loads))]
    fn take_outputs(&mut self, with_loads: bool) -> Vec<OutputRow> {
        self.0.take_outputs(with_loads).into_iter().map(output_row).collect()
    }

    fn n_waiting(&self, rank: u32) -> PyResult<usize> {
        Ok(self.scheduler(rank)?.n_waiting())
    }

    fn active_blocks(&self, rank: u32) -> PyResult<usize> {
        Ok(self.scheduler(rank)?.kv.active_blocks())
    }

    fn cached_blocks(&self, rank: u32) -> PyResult<u64> {
        Ok(self.scheduler(rank)?.kv.cached_blocks())
    }

    fn snapshot(&self, rank: u32) -> PyResult<KvEvents> {
        Ok(self.scheduler(rank)?.kv.snapshot().into())
    }

    fn check_integrity(&self, rank: u32) -> PyResult<Vec<String>> {
        Ok(self.scheduler(rank)?.check_integrity())
    }
}

impl EngineRanks {
    fn scheduler(&self, rank: u32) -> PyResult<&Scheduler<Content>> {
        self.0.scheduler(rank).ok_or_else(|| no_rank(rank))
    }

    fn change(
        &mut self,
        number: u64,
        change: impl FnOnce(&mut Scheduler<Content>, u32) -> PyResult<()>,
    ) -> PyResult<()> {
        let handle = Handle { rank: (number >> 32) as u32, slot: number as u32 };
        self.scheduler(handle.rank)
            .ok()
            .filter(|scheduler| scheduler.holds(handle.slot))
            .ok_or_else(|| PyKeyError::new_err(format!("sequence {number} is not here")))?;
        self.0
            .change(handle.rank, |scheduler| change(scheduler, handle.slot))
            .ok_or_else(|| no_rank(handle.rank))?
    }
}

fn to_number(rank: u32, slot: u32) -> u64 {
    u64::from(rank) << 32 | u64::from(slot)
}

fn no_rank(rank: u32) -> PyErr {
    PyKeyError::new_err(format!("rank {rank} is not here"))
}

fn output_row(outputs: Outputs) -> OutputRow {
    let rank = outputs.rank;
    let load = outputs.load.map(|load| (load.active_blocks, load.prefill_tokens, load.running, load.waiting));
    let chunks = outputs.chunks.into_iter().map(|chunk| {
        let finish = match chunk.finish {
            None => 0,
            Some(Finish::Length) => 1,
            Some(Finish::Stop) => 2,
            Some(Finish::Dropped) => 3,
        };
        (to_number(rank, chunk.slot), chunk.n_tokens, chunk.cached_tokens, finish)
    });
    let seated = outputs.seated.into_iter().map(|(slot, at_s)| (to_number(rank, slot), at_s));
    let events = (!outputs.events.is_empty()).then(|| outputs.events.into());
    (rank, events, load, chunks.collect(), seated.collect())
}
