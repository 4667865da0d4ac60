//! `Predictor`: the expected seconds of a request at each slot, from columns that numpy holds.

use std::ffi::CStr;
use std::ops::Range;

use kvrouter_core::prediction::{Asked, Prediction, Rates, Slots, N_PARTS};
use kvrouter_core::timing::Timing;
use pyo3::buffer::{Element, PyBuffer};
use pyo3::exceptions::{PyBufferError, PyIndexError, PyTypeError, PyValueError};
use pyo3::prelude::*;

/// A column that Python holds, to be read.
pub struct Columns<T: Element>(PyBuffer<T>);

impl<T: Element> Columns<T> {
    pub fn get(name: &str, column: &Bound<'_, PyAny>, at_least: usize) -> PyResult<Self> {
        let buffer = PyBuffer::<T>::get(column)
            .map_err(|error| PyTypeError::new_err(format!("{name}: not a column of its type: {error}")))?;
        if !buffer.is_c_contiguous() || buffer.item_count() < at_least {
            return Err(PyValueError::new_err(format!("{name}: at least {at_least} entries, C-contiguous")));
        }
        Ok(Columns(buffer))
    }

    pub fn maybe(name: &str, column: Option<&Bound<'_, PyAny>>, at_least: usize) -> PyResult<Option<Self>> {
        column.map(|column| Self::get(name, column, at_least)).transpose()
    }

    fn needed(name: &str, column: Option<&Bound<'_, PyAny>>, at_least: usize) -> PyResult<Self> {
        Self::maybe(name, column, at_least)?
            .ok_or_else(|| PyTypeError::new_err(format!("{name}: a column, not None")))
    }

    pub fn as_slice(&self, _attached: Python<'_>) -> &[T] {
        if self.0.item_count() == 0 {
            return &[];
        }
        // SAFETY: contiguous, aligned elements (checked by PyBuffer), kept alive by the buffer; while the caller is
        // attached no Python code writes to them, and the ledger's owner is the thread that is attached.
        unsafe { std::slice::from_raw_parts(self.0.buf_ptr().cast::<T>(), self.0.item_count()) }
    }
}

/// One entry of a column of booleans: a byte.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct Flag(u8);

// SAFETY: of the size and alignment of a boolean, and every byte is valid.
unsafe impl Element for Flag {
    fn is_compatible_format(format: &CStr) -> bool {
        format == c"?"
    }
}

impl Columns<Flag> {
    /// The column as bytes, not 0 where the entry is true.
    pub fn as_bytes(&self, attached: Python<'_>) -> &[u8] {
        let flags = self.as_slice(attached);
        // SAFETY: a flag is a byte.
        unsafe { std::slice::from_raw_parts(flags.as_ptr().cast::<u8>(), flags.len()) }
    }
}

#[pyclass(frozen, module = "kvrouter._native")]
pub struct Predictor(Rates);

#[pymethods]
impl Predictor {
    #[new]
    #[pyo3(signature = (timing, *, chunk_tokens, others_weight, later_weight, stalls_weight, turnover_weight, decode_weight))]
    fn new(
        timing: [f64; 11],
        chunk_tokens: f64,
        others_weight: f64,
        later_weight: f64,
        stalls_weight: f64,
        turnover_weight: f64,
        decode_weight: f64,
    ) -> PyResult<Self> {
        if !(chunk_tokens >= 1.0 && chunk_tokens.is_finite()) {
            return Err(PyValueError::new_err("chunk_tokens: at least 1"));
        }
        Ok(Predictor(Rates {
            timing: Timing::from(timing),
            chunk_tokens,
            answer_s: 0.0,
            interference: 1.0,
            overlap_weight: 1.0,
            others_weight,
            later_weight,
            stalls_weight,
            turnover_weight,
            decode_weight,
            now_s: 0.0,
        }))
    }

    /// Fills `out` with the cost of each slot; with infinity where `among` is 0.
    #[pyo3(signature = (out, columns, asked, among=None))]
    fn totals(
        &self,
        py: Python<'_>,
        out: &Bound<'_, PyAny>,
        columns: &RankColumns,
        asked: AskedArgs,
        among: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let out = PyBuffer::<f64>::get(out)?;
        if out.readonly() || !out.is_c_contiguous() {
            return Err(PyBufferError::new_err("out: the buffer has to be writable and C-contiguous"));
        }
        let n_slots = out.item_count();
        if n_slots == 0 {
            return Ok(());
        }
        columns.check(n_slots)?;
        let among = Columns::<Flag>::maybe("among", among, n_slots)?;
        // SAFETY: contiguous, writable and kept alive by the buffer; the caller is attached, and none of the columns that
        // are read is a part of it.
        let total = unsafe { std::slice::from_raw_parts_mut(out.buf_ptr().cast::<f64>(), n_slots) };
        let among = among.as_ref().map(|column| column.as_bytes(py));
        self.prediction(&columns.slots(py), 0..n_slots, asked).totals(total, among);
        Ok(())
    }

    /// The parts of one slot.
    fn parts(
        &self,
        py: Python<'_>,
        slot: usize,
        columns: &RankColumns,
        asked: AskedArgs,
    ) -> PyResult<[f64; N_PARTS]> {
        columns.check(slot + 1)?;
        Ok(self.prediction(&columns.slots(py), slot..slot + 1, asked).at(0))
    }
}

/// Prompt tokens and blocks, the size of a block, the seconds of an answer, the interference, the weight of overlap, now;
/// whether the leg prefills and decodes, whether tokens and blocks count, and whether those do who are answered meanwhile.
pub type AskedArgs = ([f64; 7], [bool; 5]);

impl Predictor {
    pub fn prediction<'a>(&self, slots: &Slots<'a>, range: Range<usize>, asked: AskedArgs) -> Prediction<'a> {
        let ([isl_tokens, total_blocks, block_size, answer_s, interference, overlap_weight, now_s], flags) =
            asked;
        let [prefills, decodes, counts_tokens, counts_blocks, stalls] = flags;
        let asked = Asked {
            isl_tokens,
            total_blocks,
            block_size,
            prefills,
            decodes,
            counts_tokens,
            counts_blocks,
            stalls,
        };
        Prediction::new(
            slots,
            range,
            asked,
            Rates { answer_s, interference, overlap_weight, now_s, ..self.0 },
        )
    }
}

/// What predictions read of each slot. The columns are borrowed, so that they keep their size meanwhile.
#[pyclass(frozen, module = "kvrouter._native")]
pub struct RankColumns {
    n_slots: usize,
    overlap_blocks: Option<Columns<u32>>,
    not_active: Option<Columns<u32>>,
    counts: [Columns<i64>; 4],
    figures: [Columns<f64>; 6],
    takes_whole: Columns<Flag>,
}

#[pymethods]
impl RankColumns {
    /// Overlap, not active (both may be None), prefill tokens, active blocks, requests, waiting, total blocks, seats,
    /// slowness, slowness of decode, turnover, when the step that runs began, where whole requests are placed.
    #[new]
    fn new(n_slots: usize, columns: [Option<Bound<'_, PyAny>>; 13]) -> PyResult<Self> {
        let [overlap, not_active, tokens, blocks, requests, waiting, figures @ .., takes_whole] = &columns;
        let [total, seats, slowness, decode, turnover, began] = figures;
        Ok(RankColumns {
            n_slots,
            overlap_blocks: Columns::maybe("overlap_blocks", overlap.as_ref(), n_slots)?,
            not_active: Columns::maybe("not_active", not_active.as_ref(), n_slots)?,
            counts: [
                Columns::needed("prefill_tokens", tokens.as_ref(), n_slots)?,
                Columns::needed("active_blocks", blocks.as_ref(), n_slots)?,
                Columns::needed("requests", requests.as_ref(), n_slots)?,
                Columns::needed("waiting", waiting.as_ref(), n_slots)?,
            ],
            figures: [
                Columns::needed("total_blocks", total.as_ref(), n_slots)?,
                Columns::needed("seats", seats.as_ref(), n_slots)?,
                Columns::needed("slowness", slowness.as_ref(), n_slots)?,
                Columns::needed("decode_slowness", decode.as_ref(), n_slots)?,
                Columns::needed("turnover", turnover.as_ref(), n_slots)?,
                Columns::needed("step_began_s", began.as_ref(), n_slots)?,
            ],
            takes_whole: Columns::needed("takes_whole", takes_whole.as_ref(), n_slots)?,
        })
    }
}

impl RankColumns {
    pub fn check(&self, n_slots: usize) -> PyResult<()> {
        if n_slots > self.n_slots {
            return Err(PyIndexError::new_err(format!("columns: of {} slots, not {n_slots}", self.n_slots)));
        }
        Ok(())
    }

    pub fn slots<'a>(&'a self, py: Python<'_>) -> Slots<'a> {
        let [prefill_tokens, active_blocks, requests, waiting] = &self.counts;
        let [total_blocks, seats, slowness, decode_slowness, turnover, step_began_s] = &self.figures;
        Slots {
            overlap_blocks: self.overlap_blocks.as_ref().map(|column| column.as_slice(py)),
            not_active: self.not_active.as_ref().map(|column| column.as_slice(py)),
            prefill_tokens: prefill_tokens.as_slice(py),
            active_blocks: active_blocks.as_slice(py),
            requests: requests.as_slice(py),
            waiting: &waiting.as_slice(py)[..self.n_slots],
            takes_whole: &self.takes_whole.as_bytes(py)[..self.n_slots],
            total_blocks: total_blocks.as_slice(py),
            seats: seats.as_slice(py),
            slowness: slowness.as_slice(py),
            decode_slowness: decode_slowness.as_slice(py),
            turnover: turnover.as_slice(py),
            step_began_s: step_began_s.as_slice(py),
        }
    }
}
