//! The seconds that a request is expected to take to its first token at each slot, part by part;
//! `kvrouter.kernel.routing.prediction` has the formulas.

use std::borrow::Cow;
use std::ops::Range;

use crate::timing::Timing;

/// How many parts a prediction has.
pub const N_PARTS: usize = 6;

/// Requests a rank that wait on average in a burst that is soon over.
const PASSING_QUEUE: f64 = 1.5;

/// What each slot holds and does. The columns have an entry for each slot.
pub struct Slots<'a> {
    /// Leading blocks of the request that are there; None where no index is kept.
    pub overlap_blocks: Option<&'a [u32]>,
    /// Blocks of the request that no running one holds there; None: all of them.
    pub not_active: Option<&'a [u32]>,
    pub prefill_tokens: &'a [i64],
    pub active_blocks: &'a [i64],
    pub requests: &'a [i64],
    /// Of all slots, where others have entries of the first ones.
    pub waiting: &'a [i64],
    /// Not 0 where whole requests are placed, of all slots too.
    pub takes_whole: &'a [u8],
    /// Infinite where it is unknown.
    pub total_blocks: &'a [f64],
    /// Infinite where it is unknown.
    pub seats: &'a [f64],
    pub slowness: &'a [f64],
    pub decode_slowness: &'a [f64],
    pub turnover: &'a [f64],
    /// When the step that runs began, on the clock of `now_s`; negative infinity where it is unknown.
    pub step_began_s: &'a [f64],
}

/// What is asked for, and what of it counts.
#[derive(Clone, Copy)]
pub struct Asked {
    pub isl_tokens: f64,
    pub total_blocks: f64,
    pub block_size: f64,
    pub prefills: bool,
    pub decodes: bool,
    /// Whether prompt tokens count, and blocks.
    pub counts_tokens: bool,
    pub counts_blocks: bool,
    /// Whether prompts and answers stall each other here: those count who are answered while the prompt is computed,
    /// and for an answer alone what is computed there now.
    pub stalls: bool,
}

/// What holds for every slot.
#[derive(Clone, Copy)]
pub struct Rates {
    pub timing: Timing,
    /// Prompt tokens of one step.
    pub chunk_tokens: f64,
    /// How long an answer keeps its blocks.
    pub answer_s: f64,
    /// What share of the decode steps of others a prompt waits for.
    pub interference: f64,
    pub overlap_weight: f64,
    pub others_weight: f64,
    pub later_weight: f64,
    pub stalls_weight: f64,
    pub turnover_weight: f64,
    pub decode_weight: f64,
    pub now_s: f64,
}

/// What is predicted for one request.
pub struct Prediction<'a> {
    slots: Slots<'a>,
    overlap_blocks: Cow<'a, [u32]>,
    /// Blocks of the request that it would add to each slot.
    new_blocks: Cow<'a, [u32]>,
    asked: Asked,
    rates: Rates,
    steps: Steps,
    /// What the prompt weighs in how fast a cache is replaced, in seconds.
    prompt_s: f64,
    /// Those who come while a queue lasts, where whole requests are placed.
    later: f64,
}

impl<'a> Prediction<'a> {
    /// A prediction for the slots of a range, which are numbered from its start.
    ///
    /// # Panics
    /// When a column ends before the range does.
    pub fn new(slots: &Slots<'a>, range: Range<usize>, asked: Asked, rates: Rates) -> Self {
        let steps = Steps::new(rates);
        let counts = asked.counts_tokens || asked.counts_blocks;
        let prompt_s = rates.turnover_weight * asked.isl_tokens * steps.token_s();
        let is_whole = asked.prefills && asked.decodes && !asked.stalls;
        let mean_waiting = if is_whole { mean(slots.waiting, slots.takes_whole) } else { 0.0 };
        let column = |column: Option<&'a [u32]>, otherwise| match column {
            Some(column) => Cow::Borrowed(&column[range.clone()]),
            None => Cow::Owned(vec![otherwise; range.len()]),
        };
        Prediction {
            slots: slots.within(&range),
            overlap_blocks: column(slots.overlap_blocks, 0),
            new_blocks: column(slots.not_active, asked.total_blocks as u32),
            asked,
            rates,
            steps,
            prompt_s: if counts { prompt_s } else { 0.0 },
            later: rates.later_weight * (mean_waiting - PASSING_QUEUE).clamp(0.0, 1.0),
        }
    }

    /// Fills `total` with the sum of the parts of each slot, in which queue and prefill are weighed; with infinity
    /// where `among` is 0.
    ///
    /// # Panics
    /// When `among` has fewer entries than `total`.
    pub fn totals(&self, total: &mut [f64], among: Option<&[u8]>) {
        match self.legs() {
            (true, true) => self.fill::<true, true>(total, among),
            (true, false) => self.fill::<true, false>(total, among),
            (false, true) => self.fill::<false, true>(total, among),
            (false, false) => self.fill::<false, false>(total, among),
        }
    }

    /// The parts of one slot: queue, prefill, memory, decode, others, turnover.
    pub fn at(&self, slot: usize) -> [f64; N_PARTS] {
        let row = self.slots.row(slot, &self.overlap_blocks, &self.new_blocks);
        match self.legs() {
            (true, true) => self.parts::<true, true>(&row),
            (true, false) => self.parts::<true, false>(&row),
            (false, true) => self.parts::<false, true>(&row),
            (false, false) => self.parts::<false, false>(&row),
        }
    }

    /// The cost of a prefill leg, and what of it is the request's own time.
    #[inline]
    pub fn prefill_leg(&self, slot: usize) -> (f64, f64) {
        let parts = self.at(slot);
        (self.weighed(&parts), parts[0] + parts[1])
    }

    /// What a decode leg costs without the wait for memory, and that wait.
    #[inline]
    pub fn decode_leg(&self, slot: usize) -> (f64, f64) {
        let [queue_s, _, memory_s, decode_s, others_s, turnover_s] = self.at(slot);
        (queue_s + decode_s + others_s + turnover_s, memory_s)
    }

    /// Tokens of the prompt that are not cached at the slot.
    #[inline]
    pub fn missing_tokens(&self, slot: usize) -> f64 {
        (self.asked.isl_tokens - f64::from(self.overlap_blocks[slot]) * self.asked.block_size).max(0.0)
    }

    #[inline(always)]
    fn weighed(&self, parts: &[f64; N_PARTS]) -> f64 {
        let [queue_s, prefill_s, memory_s, decode_s, others_s, turnover_s] = parts;
        self.rates.overlap_weight * (queue_s + prefill_s) + memory_s + decode_s + others_s + turnover_s
    }

    /// Whether the prompt counts, and the blocks.
    fn legs(&self) -> (bool, bool) {
        let asked = &self.asked;
        (asked.prefills && asked.counts_tokens, asked.decodes && asked.counts_blocks)
    }

    fn fill<const PREFILLS: bool, const DECODES: bool>(&self, total: &mut [f64], among: Option<&[u8]>) {
        let n_slots = total.len();
        let slots = self.slots.within(&(0..n_slots));
        let columns = (&self.overlap_blocks[..n_slots], &self.new_blocks[..n_slots]);
        let among = among.map_or(&[][..], |among| &among[..n_slots]);
        if !among.is_empty() && count_of(among) < n_slots / 4 * 3 {
            for (slot, (total, &is_among)) in total.iter_mut().zip(among).enumerate() {
                *total = if is_among == 0 {
                    f64::INFINITY
                } else {
                    self.total::<PREFILLS, DECODES>(&slots, columns, slot)
                };
            }
            return;
        }
        // Without a branch in a slot the compiler makes vectors of slots, in less time than most of them one by one.
        for (slot, total) in total.iter_mut().enumerate() {
            *total = self.total::<PREFILLS, DECODES>(&slots, columns, slot);
        }
        for (total, &is_among) in total.iter_mut().zip(among) {
            *total = if is_among == 0 { f64::INFINITY } else { *total };
        }
    }

    #[inline(always)]
    fn total<const PREFILLS: bool, const DECODES: bool>(
        &self,
        slots: &Slots,
        (overlap_blocks, new_blocks): (&[u32], &[u32]),
        slot: usize,
    ) -> f64 {
        self.weighed(&self.parts::<PREFILLS, DECODES>(&slots.row(slot, overlap_blocks, new_blocks)))
    }

    #[inline(always)]
    fn parts<const PREFILLS: bool, const DECODES: bool>(&self, row: &Row) -> [f64; N_PARTS] {
        let (asked, rates, steps) = (&self.asked, &self.rates, &self.steps);
        let Row { slowness, decode_slowness, held_blocks, total_blocks, .. } = *row;
        let of_blocks = total_blocks.recip();
        let running = (row.requests - row.waiting).max(0.0);
        let is_running = running > 0.0;
        let (mut queue_s, mut prefill_s) = (0.0, 0.0);
        if PREFILLS {
            let new_tokens = (asked.isl_tokens - row.overlap_blocks * asked.block_size).max(0.0);
            prefill_s = slowness * steps.prefill_s(new_tokens, asked.isl_tokens);
            // Those who decode share each step.
            let use_share = (held_blocks * of_blocks).min(1.0);
            let shared_s = steps.decode_s(use_share, running, held_blocks * asked.block_size);
            let shared_s = if is_running { rates.interference * decode_slowness * shared_s } else { 0.0 };
            let computed_tokens = row.prefill_tokens.min(rates.chunk_tokens);
            let later_tokens = row.prefill_tokens - computed_tokens;
            let n_steps = 1.0 + (later_tokens + new_tokens) * steps.of_chunk;
            let step_s = slowness * curve_s(&steps.timing, computed_tokens) + shared_s;
            let runs_on_s = remaining_s(step_s, rates.now_s - row.step_began_s);
            queue_s = slowness * later_tokens * steps.token_s() + n_steps * shared_s;
            queue_s += if computed_tokens > 0.0 { runs_on_s } else { 0.0 };
        }
        if DECODES && !PREFILLS && asked.stalls && asked.counts_tokens {
            let computed_tokens = row.prefill_tokens.max(0.0).min(rates.chunk_tokens);
            queue_s = slowness * computed_tokens * steps.token_s();
        }
        let (mut memory_s, mut decode_s, mut held_s) = (0.0, 0.0, 0.0);
        if DECODES {
            let active = held_blocks + row.new_blocks;
            let lacking = active - total_blocks;
            let answer_s = decode_slowness * rates.answer_s;
            // Blocks come back an answer's at a time: on average half of the time between two ends is added.
            let blocks_s = answer_s * (lacking * of_blocks + 0.5 / running.max(1.0));
            memory_s = if lacking > 0.0 { blocks_s } else { 0.0 };
            held_s = if lacking > 0.0 { row.new_blocks * answer_s * of_blocks } else { 0.0 };
            let unseated = row.requests + 1.0 - row.seats;
            let seated_s = memory_s.max(unseated * answer_s / row.seats);
            memory_s = if unseated > 0.0 { seated_s } else { memory_s };
            if rates.decode_weight > 0.0 {
                let use_share = (active * of_blocks).min(1.0);
                let step_s = steps.decode_s(use_share, running + 1.0, active * asked.block_size);
                decode_s = rates.decode_weight * decode_slowness * step_s;
            }
        }
        let mut others_s = rates.others_weight * (row.waiting + self.later) * (prefill_s + held_s);
        if asked.stalls {
            // Each who is answered there waits once for the prompt: spread over the steps of its answer.
            let share = (decode_s / (decode_slowness * rates.answer_s)).min(1.0);
            let stalled_s = others_s + rates.stalls_weight * running * prefill_s * share;
            others_s = if is_running && decode_s > 0.0 { stalled_s } else { others_s };
        }
        [queue_s, prefill_s, memory_s, decode_s, others_s, slowness * self.prompt_s * row.turnover]
    }
}

/// What one slot holds and does.
struct Row {
    overlap_blocks: f64,
    new_blocks: f64,
    prefill_tokens: f64,
    held_blocks: f64,
    requests: f64,
    waiting: f64,
    total_blocks: f64,
    seats: f64,
    slowness: f64,
    decode_slowness: f64,
    turnover: f64,
    step_began_s: f64,
}

impl<'a> Slots<'a> {
    #[inline(always)]
    fn row(&self, slot: usize, overlap_blocks: &[u32], new_blocks: &[u32]) -> Row {
        Row {
            overlap_blocks: f64::from(overlap_blocks[slot]),
            new_blocks: f64::from(new_blocks[slot]),
            prefill_tokens: self.prefill_tokens[slot] as f64,
            held_blocks: self.active_blocks[slot] as f64,
            requests: self.requests[slot] as f64,
            waiting: self.waiting[slot] as f64,
            total_blocks: self.total_blocks[slot],
            seats: self.seats[slot],
            slowness: self.slowness[slot],
            decode_slowness: self.decode_slowness[slot],
            turnover: self.turnover[slot],
            step_began_s: self.step_began_s[slot],
        }
    }

    fn within(&self, range: &Range<usize>) -> Self {
        Slots {
            overlap_blocks: self.overlap_blocks,
            not_active: self.not_active,
            prefill_tokens: &self.prefill_tokens[range.clone()],
            active_blocks: &self.active_blocks[range.clone()],
            requests: &self.requests[range.clone()],
            waiting: &self.waiting[range.clone()],
            takes_whole: &self.takes_whole[range.clone()],
            total_blocks: &self.total_blocks[range.clone()],
            seats: &self.seats[range.clone()],
            slowness: &self.slowness[range.clone()],
            decode_slowness: &self.decode_slowness[range.clone()],
            turnover: &self.turnover[range.clone()],
            step_began_s: &self.step_began_s[range.clone()],
        }
    }
}

fn count_of(among: &[u8]) -> usize {
    among.iter().filter(|&&is_among| is_among != 0).count()
}

/// Numbers from here to twice as much have no fraction.
const WHOLE: f64 = (1u64 << 52) as f64;

/// Times of steps, for an engine of slowness 1.
struct Steps {
    /// In seconds, so that no slot divides by 1,000.
    timing: Timing,
    chunk_tokens: f64,
    /// A step that is full of prompt tokens.
    chunk_s: f64,
    token_s: f64,
    of_chunk: f64,
}

impl Steps {
    fn new(rates: Rates) -> Self {
        let timing = Timing::from(<[f64; 11]>::from(rates.timing).map(|ms| ms / 1_000.0));
        let chunk_s = curve_s(&timing, rates.chunk_tokens);
        let token_s = chunk_s / rates.chunk_tokens;
        Steps {
            timing,
            chunk_tokens: rates.chunk_tokens,
            chunk_s,
            token_s,
            of_chunk: rates.chunk_tokens.recip(),
        }
    }

    /// The seconds of a prompt token in a full step.
    fn token_s(&self) -> f64 {
        self.token_s
    }

    /// The last `tokens` of a prompt, in steps of their own.
    fn prefill_s(&self, tokens: f64, isl_tokens: f64) -> f64 {
        // Adding 2^52 rounds to a whole number, in vectors too, where `floor` is a call.
        let chunks = tokens * self.of_chunk;
        let rounded = (chunks + WHOLE) - WHOLE;
        let full = if rounded > chunks { rounded - 1.0 } else { rounded };
        let rest = tokens - full * self.chunk_tokens;
        let steps_s = full * self.chunk_s + if rest > 0.0 { curve_s(&self.timing, rest) } else { 0.0 };
        let attended = tokens * (isl_tokens - tokens).max(0.0) + 0.5 * tokens * (tokens + 1.0);
        steps_s + self.timing.prefill_attention * attended
    }

    fn decode_s(&self, use_share: f64, n_sequences: f64, kv_tokens: f64) -> f64 {
        let timing = &self.timing;
        let curve = (timing.decode_quadratic * use_share + timing.decode_linear) * use_share;
        let lasts = (curve + timing.decode_base).max(timing.decode_min);
        lasts + timing.decode_sequence * n_sequences + timing.decode_kv_token * kv_tokens
    }
}

/// What is left of a step of `step_s` that began `elapsed_s` ago: a late one takes longer, the later it is.
#[inline(always)]
fn remaining_s(step_s: f64, elapsed_s: f64) -> f64 {
    let late_s = (elapsed_s - step_s).min(0.5 * step_s);
    if elapsed_s > step_s {
        late_s
    } else {
        step_s - elapsed_s
    }
}

/// The mean of the counts where `among` is not 0; 0 where it is 0 everywhere.
fn mean(counts: &[i64], among: &[u8]) -> f64 {
    let (mut sum, mut n) = (0, 0);
    for (&count, &is_among) in counts.iter().zip(among) {
        let is_among = i64::from(is_among != 0);
        sum += count * is_among;
        n += is_among;
    }
    sum as f64 / n.max(1) as f64
}

fn curve_s(timing: &Timing, tokens: f64) -> f64 {
    (timing.prefill_quadratic * tokens + timing.prefill_linear) * tokens + timing.prefill_base
}
