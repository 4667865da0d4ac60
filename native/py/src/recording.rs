//! `RecordQueue`: the event loop notes records in it, a thread takes and packs them.

use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

use kvrouter_core::recording::{Lines, NotSeconds, Text};
use pyo3::exceptions::{PyIndexError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString, PyTuple};

use crate::buffers::OutBytes;
use crate::hashing::Prompt;

/// What `kvrouter.recording.request` calls `RequestFields`, `AttemptFields` and `LegFields`.
type Request<'py> = (
    Bound<'py, PyString>,
    Option<Bound<'py, PyString>>,
    bool,
    i64,
    i64,
    Bound<'py, PyString>,
    Option<Bound<'py, PyString>>,
    f64,
    Option<f64>,
    f64,
    Bound<'py, PyTuple>,
);
type Attempt<'py> = (
    Bound<'py, PyString>,
    Bound<'py, PyString>,
    f64,
    Bound<'py, PyTuple>,
    Option<i64>,
    bool,
    Option<Bound<'py, PyString>>,
    bool,
    bool,
    bool,
    Option<Bound<'py, PyString>>,
    Option<Bound<'py, PyString>>,
);
type Leg<'py> = (
    Bound<'py, PyString>,
    (i64, i64),
    i64,
    Bound<'py, PyDict>,
    i64,
    Option<f64>,
    Option<f64>,
    Option<f64>,
    Option<i64>,
);

#[pyclass(frozen, module = "kvrouter._native")]
pub struct RecordQueue {
    noted: Mutex<Lines>,
    taken: Mutex<Lines>,
    key: [u8; 16],
    began_s: f64,
    bytes_max: usize,
}

#[pymethods]
impl RecordQueue {
    #[new]
    #[pyo3(signature = (*, key, began_s, bytes_max))]
    fn new(key: &[u8], began_s: f64, bytes_max: usize) -> PyResult<Self> {
        let key =
            key.try_into().map_err(|_| PyValueError::new_err(format!("key: 16 bytes, not {}", key.len())))?;
        let (noted, taken) = (Mutex::default(), Mutex::default());
        Ok(RecordQueue { noted, taken, key, began_s, bytes_max })
    }

    fn add(&self, line: &[u8], at_s: f64, bytes_max: usize) -> bool {
        let mut lines = locked(&self.noted);
        let has_room = lines.n_bytes() + line.len() <= bytes_max;
        if has_room {
            lines.add(line, at_s);
        }
        has_room
    }

    #[pyo3(signature = (prompt, request, more, /))]
    fn add_request(
        &self,
        prompt: &Bound<'_, Prompt>,
        request: &Bound<'_, PyTuple>,
        more: &[u8],
    ) -> PyResult<bool> {
        let prompt = &prompt.get().inner;
        let hashes = prompt.sequence_hashes();
        let (
            model,
            adapter,
            has_media,
            max_tokens,
            output_tokens,
            status,
            route,
            begun_s,
            first_s,
            ended_s,
            attempts,
        ): Request<'_> = request.extract()?;
        let mut lines = locked(&self.noted);
        if lines.n_bytes() + 8 * hashes.len() > self.bytes_max {
            return Ok(false);
        }
        let at_s = begun_s - self.began_s;
        lines.add_request(hashes, at_s, |text| {
            let mut line = Line { text, begun_s };
            line.seconds("{\"kind\":\"request\",\"at_s\":", at_s)?;
            line.string(",\"model\":", Some(&model))?;
            line.whole(",\"input_tokens\":", prompt.isl_tokens as i64);
            line.whole(",\"output_tokens\":", output_tokens);
            line.whole(",\"max_tokens\":", max_tokens);
            line.whole(",\"block_size\":", prompt.block_size as i64);
            line.string(",\"status\":", Some(&status))?;
            line.string(",\"route\":", route.as_ref())?;
            line.string(",\"adapter\":", adapter.as_ref())?;
            line.flag(",\"media\":true", has_media);
            line.text.raw(more);
            line.raw(",\"attempts\":[");
            for (number, attempt) in attempts.iter().enumerate() {
                line.raw(if number > 0 { ",{" } else { "{" });
                line.attempt(&attempt)?;
                line.raw("}");
            }
            line.seconds("],\"ended_s\":", ended_s - begun_s)?;
            line.moment(",\"first_token_s\":", first_s)?;
            line.raw(",\"blocks\":\"");
            Ok::<_, PyErr>(())
        })?;
        Ok(true)
    }

    fn take(&self) -> usize {
        let mut taken = locked(&self.taken);
        taken.clear();
        std::mem::swap(&mut *taken, &mut *locked(&self.noted));
        taken.n_records()
    }

    fn batch(&self, first: usize, bytes_max: usize) -> PyResult<(usize, usize, f64)> {
        let lines = locked(&self.taken);
        check_lines(&lines, first..first.saturating_add(1))?;
        let end = lines.end_of(first, bytes_max);
        Ok((end, lines.size(first..end).room_bytes(), lines.at_s(first)))
    }

    fn pack(&self, first: usize, end: usize, out: &Bound<'_, PyAny>) -> PyResult<(usize, bool)> {
        let mut out_bytes = OutBytes::get(out)?;
        out.py().detach(|| {
            let lines = locked(&self.taken);
            check_lines(&lines, first..end)?;
            let size = lines.size(first..end);
            // SAFETY: who calls this uses the bytes for nothing else until it returns.
            let bytes = unsafe { out_bytes.as_mut_slice() };
            if bytes.len() < size.room_bytes() {
                let (n_needed, n_bytes) = (size.room_bytes(), bytes.len());
                return Err(PyValueError::new_err(format!("out: {n_needed} bytes, not {n_bytes}")));
            }
            Ok(match size.is_searched() {
                true => (lines.write(first..end, &self.key, bytes), false),
                false => (lines.store(first..end, &self.key, bytes), true),
            })
        })
    }
}

/// A line as it is written; its moments are counted from the request's arrival.
struct Line<'a, 'b> {
    text: &'a mut Text<'b>,
    begun_s: f64,
}

impl Line<'_, '_> {
    fn attempt(&mut self, attempt: &Bound<'_, PyAny>) -> PyResult<()> {
        let (
            shape,
            mode,
            placed_s,
            legs,
            kv_bytes,
            kv_bytes_reported,
            constraint,
            fallback_used,
            cross_domain,
            last_resort,
            lost,
            kv_lost,
        ): Attempt<'_> = attempt.extract()?;
        self.string("\"shape\":", Some(&shape))?;
        self.string(",\"mode\":", Some(&mode))?;
        self.seconds(",\"placed_s\":", placed_s - self.begun_s)?;
        self.raw(",\"legs\":[");
        for (number, leg) in legs.iter().enumerate() {
            self.raw(if number > 0 { ",{" } else { "{" });
            self.leg(&leg)?;
            self.raw("}");
        }
        self.raw("]");
        self.count(",\"kv_bytes\":", kv_bytes);
        self.flag(",\"kv_bytes_reported\":true", kv_bytes_reported);
        self.string(",\"constraint\":", constraint.as_ref())?;
        self.flag(",\"fallback_used\":true", fallback_used);
        self.flag(",\"cross_domain\":true", cross_domain);
        self.flag(",\"last_resort\":true", last_resort);
        self.string(",\"lost\":", lost.as_ref())?;
        self.string(",\"kv_lost\":", kv_lost.as_ref())
    }

    fn leg(&mut self, leg: &Bound<'_, PyAny>) -> PyResult<()> {
        let (leg, rank, overlap_blocks, domains, candidates, sent_s, first_s, last_s, cached_tokens): Leg<
            '_,
        > = leg.extract()?;
        self.string("\"leg\":", Some(&leg))?;
        self.whole(",\"worker\":\"", rank.0);
        self.whole("/", rank.1);
        self.whole("\",\"overlap_blocks\":", overlap_blocks);
        if !domains.is_empty() {
            let mut before = ",\"domains\":{";
            for (domain, value) in domains {
                self.string(before, Some(domain.cast()?))?;
                self.string(":", Some(value.cast()?))?;
                before = ",";
            }
            self.raw("}");
        }
        self.count(",\"candidates\":", (candidates != 0).then_some(candidates));
        self.moment(",\"sent_s\":", sent_s)?;
        self.moment(",\"first_token_s\":", first_s)?;
        self.moment(",\"last_s\":", last_s)?;
        self.count(",\"cached_tokens\":", cached_tokens);
        Ok(())
    }

    fn raw(&mut self, text: &str) {
        self.text.raw(text.as_bytes());
    }

    fn flag(&mut self, text: &str, is_set: bool) {
        if is_set {
            self.raw(text);
        }
    }

    fn string(&mut self, before: &str, value: Option<&Bound<'_, PyString>>) -> PyResult<()> {
        if let Some(value) = value {
            self.raw(before);
            self.text.string(value.to_str()?);
        }
        Ok(())
    }

    fn whole(&mut self, before: &str, number: i64) {
        self.raw(before);
        self.text.whole(number);
    }

    fn seconds(&mut self, before: &str, seconds: f64) -> PyResult<()> {
        self.raw(before);
        self.text
            .seconds(seconds)
            .map_err(|NotSeconds(seconds)| PyValueError::new_err(format!("{seconds} s are no microseconds")))
    }

    fn count(&mut self, before: &str, number: Option<i64>) {
        if let Some(number) = number {
            self.whole(before, number);
        }
    }

    /// A moment that did not come is None, or 0.
    fn moment(&mut self, before: &str, at_s: Option<f64>) -> PyResult<()> {
        match at_s {
            None | Some(0.0) => Ok(()),
            Some(at_s) => self.seconds(before, at_s - self.begun_s),
        }
    }
}

fn check_lines(lines: &Lines, range: Range<usize>) -> PyResult<()> {
    if range.is_empty() || range.end > lines.n_records() {
        return Err(PyIndexError::new_err(format!("{range:?} of {} lines", lines.n_records())));
    }
    Ok(())
}

fn locked(lines: &Mutex<Lines>) -> MutexGuard<'_, Lines> {
    lines.lock().unwrap_or_else(PoisonError::into_inner)
}
