//! `RecordQueue`: the event loop notes records in it, a thread takes and packs them.

use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

use kvrouter_core::recording::{Lines, NotSeconds, Text};
use pyo3::exceptions::{PyIndexError, PyOverflowError, PyValueError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString};

use crate::buffers::OutBytes;
use crate::hashing::Prompt;

/// An attribute of an object.
macro_rules! get {
    ($object:expr, $name:literal) => {
        $object.getattr(intern!($object.py(), $name))?
    };
}

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

    #[pyo3(signature = (request, trail, prompt, workers, route, status, begun_s, first_token_s, ended_s, output_tokens, more, /))]
    #[allow(clippy::too_many_arguments)]
    fn add_request(
        &self,
        request: &Bound<'_, PyAny>,
        trail: &Bound<'_, PyAny>,
        prompt: &Bound<'_, Prompt>,
        workers: &Bound<'_, PyDict>,
        route: Option<&Bound<'_, PyAny>>,
        status: &Bound<'_, PyAny>,
        begun_s: f64,
        first_token_s: Option<f64>,
        ended_s: f64,
        output_tokens: i64,
        more: &[u8],
    ) -> PyResult<bool> {
        let prompt = &prompt.get().inner;
        let hashes = prompt.sequence_hashes();
        let mut lines = locked(&self.noted);
        if lines.n_bytes() + 8 * hashes.len() > self.bytes_max {
            return Ok(false);
        }
        let at_s = begun_s - self.began_s;
        lines.add_request(hashes, at_s, |text| {
            let mut line = Line { text, begun_s, workers };
            line.seconds("{\"kind\":\"request\",\"at_s\":", at_s)?;
            line.string(",\"model\":", &get!(request, "model"))?;
            line.whole(",\"input_tokens\":", prompt.isl_tokens as i64);
            line.whole(",\"output_tokens\":", output_tokens);
            line.whole(",\"max_tokens\":", get!(get!(request, "sampling"), "max_tokens").extract()?);
            line.whole(",\"block_size\":", prompt.block_size as i64);
            line.string(",\"status\":", status)?;
            if let Some(route) = route {
                line.string(",\"route\":", route)?;
            }
            if let Some(adapter) = given(get!(request, "lora_name")) {
                line.string(",\"adapter\":", &adapter)?;
            }
            line.flag(",\"media\":true", &get!(request, "has_media"))?;
            line.text.raw(more);
            line.raw(",\"attempts\":[");
            for (number, attempt) in trail.try_iter()?.enumerate() {
                line.raw(if number > 0 { ",{" } else { "{" });
                line.attempt(&attempt?)?;
                line.raw("}");
            }
            line.seconds("],\"ended_s\":", ended_s - begun_s)?;
            line.moment(",\"first_token_s\":", first_token_s.unwrap_or_default())?;
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
        check_lines(&lines, first..first + 1)?;
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

/// A line as it is written, and what its moments and bytes are counted from.
struct Line<'a, 'b, 'py> {
    text: &'a mut Text<'b>,
    begun_s: f64,
    workers: &'a Bound<'py, PyDict>,
}

impl<'py> Line<'_, '_, 'py> {
    fn attempt(&mut self, attempt: &Bound<'py, PyAny>) -> PyResult<()> {
        let placement = get!(attempt, "placement");
        let decision = get!(placement, "decision");
        let decode = get!(decision, "decode");
        let prefill = given(get!(decision, "prefill"));
        let ended_s = moment(&get!(attempt, "ended_s"))?;
        let shape = get!(get!(placement, "shape"), "_name_");
        self.raw("\"shape\":\"");
        self.raw(&shape.cast::<PyString>()?.to_str()?.to_ascii_lowercase());
        self.string("\",\"mode\":", &get!(decision, "mode"))?;
        self.seconds(",\"placed_s\":", moment(&get!(attempt, "placed_s"))? - self.begun_s)?;
        self.raw(",\"legs\":[");
        if let Some(prefill) = &prefill {
            self.leg(prefill, &get!(placement, "prefill_domains"), get!(attempt, "prefill_cached_tokens"))?;
            let sent_s = moment(&get!(attempt, "prefill_sent_s"))?;
            let done_s = moment(&get!(attempt, "prefill_done_s"))?;
            self.moment(",\"sent_s\":", sent_s)?;
            self.moment(",\"last_s\":", if done_s == 0.0 && sent_s != 0.0 { ended_s } else { done_s })?;
            self.raw("},");
        }
        self.leg(&decode, &get!(placement, "decode_domains"), get!(attempt, "cached_tokens"))?;
        let sent_s = moment(&get!(attempt, "last_sent_s"))?;
        self.moment(",\"sent_s\":", sent_s)?;
        self.moment(",\"first_token_s\":", moment(&get!(attempt, "first_token_s"))?)?;
        self.moment(",\"last_s\":", if sent_s == 0.0 { 0.0 } else { ended_s })?;
        self.raw("}]");
        if let Some(prefill) = &prefill {
            self.kv_bytes(attempt, &placement, &decode, prefill)?;
        }
        if let Some(constraint) = given(get!(decision, "constraint")) {
            self.constraint(&constraint)?;
        }
        self.flag(",\"fallback_used\":true", &get!(decision, "fallback_used"))?;
        self.flag(",\"cross_domain\":true", &get!(decision, "cross_domain"))?;
        self.flag(",\"last_resort\":true", &get!(decision, "last_resort"))?;
        if let Some(leg) = given(get!(attempt, "lost_leg")) {
            self.string(",\"lost\":", &leg)?;
        }
        if let Some(loss) = given(get!(attempt, "kv_loss")) {
            self.string(",\"kv_lost\":", &loss)?;
        }
        Ok(())
    }

    /// What is known of a leg before it is sent, and what its engine found; the object is left open.
    fn leg(
        &mut self,
        pick: &Bound<'py, PyAny>,
        domains: &Bound<'py, PyAny>,
        cached: Bound<'py, PyAny>,
    ) -> PyResult<()> {
        self.string("{\"leg\":", &get!(pick, "leg"))?;
        let (worker_id, dp_rank): (i64, i64) = get!(pick, "rank").extract()?;
        self.whole(",\"worker\":\"", worker_id);
        self.whole("/", dp_rank);
        self.whole("\",\"overlap_blocks\":", get!(pick, "overlap_blocks").extract()?);
        let mut before = ",\"domains\":{";
        for (domain, value) in domains.cast::<PyDict>()? {
            self.string(before, &domain)?;
            self.string(":", &value)?;
            before = ",";
        }
        if before == "," {
            self.raw("}");
        }
        let candidates = get!(pick, "candidates").extract()?;
        if candidates != 0 {
            self.whole(",\"candidates\":", candidates);
        }
        if let Some(cached) = given(cached) {
            self.whole(",\"cached_tokens\":", cached.extract()?);
        }
        Ok(())
    }

    /// What goes from a pair's prefill worker to its decode worker: as the engine says, else as expected.
    fn kv_bytes(
        &mut self,
        attempt: &Bound<'py, PyAny>,
        placement: &Bound<'py, PyAny>,
        decode: &Bound<'py, PyAny>,
        prefill: &Bound<'py, PyAny>,
    ) -> PyResult<()> {
        if let Some(kv_bytes) = given(get!(attempt, "kv_bytes")) {
            self.whole(",\"kv_bytes\":", kv_bytes.extract()?);
            self.raw(",\"kv_bytes_reported\":true");
            return Ok(());
        }
        let (worker_id, _): (i64, i64) = get!(prefill, "rank").extract()?;
        let Some(sender) = self.workers.get_item(worker_id.to_string())? else {
            return Ok(());
        };
        let Some(bytes_a_token) = given(get!(sender, "kv_bytes_per_token")) else {
            return Ok(());
        };
        let there: i64 = get!(decode, "overlap_blocks").extract()?;
        let block_size: i64 = get!(placement, "block_size").extract()?;
        let n_tokens = get!(placement, "prompt").cast::<Prompt>()?.get().inner.isl_tokens as i64;
        let n_sent = (n_tokens - there * block_size).max(0);
        let n_bytes = n_sent.checked_mul(bytes_a_token.extract()?);
        self.whole(",\"kv_bytes\":", n_bytes.ok_or_else(|| PyOverflowError::new_err("kv_bytes_per_token"))?);
        Ok(())
    }

    /// The transfer policy that held, as `required zone=a`.
    fn constraint(&mut self, constraint: &Bound<'py, PyAny>) -> PyResult<()> {
        let policy = get!(constraint, "policy");
        let kind = policy.get_type().name()?.to_str()?.to_ascii_lowercase();
        let mut text = format!("{kind} {}", get!(policy, "domain").cast::<PyString>()?.to_str()?);
        if let Some(value) = given(get!(constraint, "value")) {
            text.push('=');
            text.push_str(value.cast::<PyString>()?.to_str()?);
        }
        self.raw(",\"constraint\":");
        self.text.string(&text);
        Ok(())
    }

    fn raw(&mut self, text: &str) {
        self.text.raw(text.as_bytes());
    }

    fn string(&mut self, before: &str, value: &Bound<'py, PyAny>) -> PyResult<()> {
        self.raw(before);
        self.text.string(value.cast::<PyString>()?.to_str()?);
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
            .map_err(|NotSeconds(seconds)| PyValueError::new_err(format!("{seconds} s")))
    }

    /// A moment as seconds from the request's arrival; 0 says that it did not come.
    fn moment(&mut self, before: &str, at_s: f64) -> PyResult<()> {
        if at_s == 0.0 {
            return Ok(());
        }
        self.seconds(before, at_s - self.begun_s)
    }

    fn flag(&mut self, text: &str, value: &Bound<'py, PyAny>) -> PyResult<()> {
        if value.is_truthy()? {
            self.raw(text);
        }
        Ok(())
    }
}

fn given(value: Bound<'_, PyAny>) -> Option<Bound<'_, PyAny>> {
    (!value.is_none()).then_some(value)
}

/// A moment; 0 where it did not come, which None says too.
fn moment(value: &Bound<'_, PyAny>) -> PyResult<f64> {
    if value.is_none() {
        Ok(0.0)
    } else {
        value.extract()
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
