//! Continuous batching on one rank of a mock engine: what runs in the next step, what waits, and what is preempted.
//!
//! A step takes every running sequence in the order of admission: one token each for those that decode, up to the
//! token budget for those that prefill (in chunks). What is left of seats and budget admits waiting sequences, first
//! come first served; a sequence is admitted when all its tokens' blocks fit at once. A sequence that decodes into a
//! new block when none is left makes the last admitted one give way (its KV is computed again later). The first
//! admitted one therefore always moves on, and a request that fits the memory alone always ends.
//!
//! A sequence whose reader has given no credit sits steps out with its KV in place, takes no seat, and is the first to
//! give way.
//!
//! A scheduler that plans ahead plans a step when the one before it begins, by what is known then: a sequence that
//! comes meanwhile, and a seat that becomes free, wait a step longer, and the engine never waits for a plan.
//!
//! Most steps repeat the one before: the same sequences decode one token each, into blocks that they have. A scheduler
//! that leaps does all of those at the end of the last, or when something comes from outside, and ends up where one
//! that makes every step does. It reports what a sequence generated with its first token, where it fills a block, and
//! at its end.

mod planning;

use std::collections::VecDeque;

use crate::paged_kv::PagedKv;
use crate::sequence::{Content, Finish, Sequence, State, Submitted};
use crate::timing::{StepLoad, Timing};

/// What one sequence computes in a step: its slot, and so many tokens.
type Work = Vec<(u32, u64)>;

#[derive(Clone, Debug)]
pub struct Config {
    pub block_size: u64,
    pub total_blocks: usize,
    pub seqs_max: usize,
    pub tokens_max: u64,
    pub chunked_prefill: bool,
    pub plans_ahead: bool,
    pub prefix_caching: bool,
    pub opaque: bool,
    pub seed: u64,
    pub timing: Timing,
    pub leaps: bool,
}

/// A step in progress. `repeats` such steps follow each other, this one included, and nothing but the number of tokens
/// changes before the end of the last, as long as nothing comes from outside.
struct Step {
    ends_at_s: f64,
    last_ends_at_s: f64,
    repeats: usize,
}

/// A sequence that generated its last token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ended {
    pub slot: u32,
    pub first_s: f64,
    pub last_s: f64,
    pub output_tokens: u64,
    pub cached_tokens: u64,
}

/// A sequence that has memory for the KV that it waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wanting {
    pub slot: u32,
    /// The tokens of its prompt that are not in its own cache.
    pub kv_tokens: u64,
}

/// What a reader was not told yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunk {
    pub slot: u32,
    pub n_tokens: u64,
    /// Told once.
    pub cached_tokens: Option<u64>,
    pub finish: Option<Finish>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Load {
    pub active_blocks: usize,
    pub prefill_tokens: u64,
    pub running: usize,
    pub waiting: usize,
}

pub struct Scheduler<C> {
    pub kv: PagedKv,
    pub(crate) ended: Vec<Ended>,
    pub(crate) wanting: Vec<Wanting>,
    /// Sequences that were given a place in a step, and when.
    pub(crate) seated: Vec<(u32, f64)>,
    /// Whether something was reported that cannot wait until somebody looks.
    pub(crate) is_urgent: bool,
    config: Config,
    sequences: Vec<Option<Sequence<C>>>,
    spare: Vec<u32>,
    waiting: VecDeque<u32>,
    ready: VecDeque<u32>,
    running: Vec<u32>,
    dirty: Vec<u32>,
    n_receiving: usize,
    n_parked: usize,
    step: Option<Step>,
    /// The durations of the step's repeats; one where all are alike.
    steps_s: Vec<f64>,
    work: Work,
    planned: Work,
    in_turn: Vec<u32>,
    now_s: f64,
    wake_at_s: Option<f64>,
    has_changed: bool,
}

impl<C: Content> Scheduler<C> {
    pub fn new(config: Config) -> Self {
        Scheduler {
            kv: PagedKv::new(config.total_blocks, config.opaque, config.seed, config.prefix_caching),
            ended: Vec::new(),
            wanting: Vec::new(),
            seated: Vec::new(),
            is_urgent: false,
            config,
            sequences: Vec::new(),
            spare: Vec::new(),
            waiting: VecDeque::new(),
            ready: VecDeque::new(),
            running: Vec::new(),
            dirty: Vec::new(),
            n_receiving: 0,
            n_parked: 0,
            step: None,
            steps_s: Vec::new(),
            work: Vec::new(),
            planned: Vec::new(),
            in_turn: Vec::new(),
            now_s: 0.0,
            wake_at_s: None,
            has_changed: true,
        }
    }

    /// When a step ends or may begin.
    pub fn next_time(&self) -> Option<f64> {
        self.step.as_ref().map(|step| step.last_ends_at_s).or(self.wake_at_s)
    }

    pub fn n_waiting(&self) -> usize {
        self.waiting.len()
    }

    pub fn holds(&self, slot: u32) -> bool {
        self.sequences.get(slot as usize).is_some_and(Option::is_some)
    }

    pub fn submit(&mut self, now: f64, submitted: Submitted<C>) -> Result<u32, C::Error> {
        self.catch_up(now)?;
        let sequence = Some(Sequence::new(submitted));
        let slot = match self.spare.pop() {
            Some(slot) => {
                self.sequences[slot as usize] = sequence;
                slot
            }
            None => {
                self.sequences.push(sequence);
                self.sequences.len() as u32 - 1
            }
        };
        self.waiting.push_back(slot);
        self.wake(now);
        Ok(slot)
    }

    /// Does the steps that were leapt over and ended before `now`, at which something comes from outside: the step that
    /// is under way is the last of them.
    pub fn catch_up(&mut self, now: f64) -> Result<(), C::Error> {
        let Some(step) = self.step.as_ref().filter(|step| step.repeats > 1) else {
            return Ok(());
        };
        let (mut done, mut ends_at_s, repeats) = (0, step.ends_at_s, step.repeats);
        while ends_at_s < now && done < repeats - 1 {
            done += 1;
            ends_at_s += self.duration_s(done);
        }
        let duration_s = self.duration_s(done);
        if done > 0 {
            self.compute(done)?;
        }
        self.step = Some(Step { ends_at_s, last_ends_at_s: ends_at_s, repeats: 1 });
        self.steps_s.clear();
        self.steps_s.push(duration_s);
        Ok(())
    }

    /// Ends the step that is due, and begins the next if something may have changed.
    pub fn advance(&mut self, now: f64) -> Result<(), C::Error> {
        self.now_s = now;
        if let Some(step) = self.step.take_if(|step| step.last_ends_at_s <= now) {
            if self.config.plans_ahead {
                self.settle();
            }
            self.compute(step.repeats)?;
            self.work.clear();
            self.free_ended();
            self.wake_at_s = Some(now);
        }
        if self.step.is_none() && self.wake_at_s.is_some_and(|at_s| at_s <= now) {
            self.wake_at_s = None;
            self.begin(now);
        }
        Ok(())
    }

    /// The load; None when nothing changed since the last.
    pub fn take_load(&mut self) -> Option<Load> {
        if !std::mem::take(&mut self.has_changed) {
            return None;
        }
        let admitted = self.running.iter().chain(&self.ready).map(|&slot| self.at(slot));
        let waiting = self.waiting.iter().map(|&slot| self.at(slot)).filter(|s| s.leg.remote_tokens == 0);
        let prefilling = admitted.chain(waiting).filter(|sequence| sequence.prefilling);
        Some(Load {
            active_blocks: self.kv.active_blocks(),
            prefill_tokens: prefilling.map(Sequence::remaining_tokens).sum(),
            running: self.running.len(),
            waiting: self.waiting.len() + self.ready.len() + self.n_receiving + self.n_parked,
        })
    }

    /// What readers were not told yet, in the order in which it was reported.
    pub fn take_chunks(&mut self, chunks: &mut Vec<Chunk>) {
        for slot in std::mem::take(&mut self.dirty) {
            let sequence = self.at_mut(slot);
            sequence.is_dirty = false;
            let is_new = sequence.cached_tokens.is_some() && !sequence.is_cached_reported;
            sequence.is_cached_reported |= is_new;
            chunks.push(Chunk {
                slot,
                n_tokens: std::mem::take(&mut sequence.pending_tokens),
                cached_tokens: if is_new { sequence.cached_tokens } else { None },
                finish: sequence.finish,
            });
            self.forget_if_over(slot);
        }
    }

    /// Ends a sequence early and frees what it holds.
    pub fn drop_sequence(&mut self, now: f64, slot: u32) -> Result<(), C::Error> {
        self.catch_up(now)?;
        let sequence = self.at_mut(slot);
        let state = std::mem::replace(&mut sequence.state, State::Ended);
        sequence.finish = Some(Finish::Dropped);
        let table = sequence.table.take();
        match state {
            State::Waiting => self.waiting.retain(|&other| other != slot),
            State::Ready => self.ready.retain(|&other| other != slot),
            State::Running => {
                self.running.retain(|&other| other != slot);
                self.work.retain(|&(other, _)| other != slot);
                self.planned.retain(|&(other, _)| other != slot);
            }
            State::Receiving => self.n_receiving -= 1,
            State::Parked => self.n_parked -= 1,
            State::Ended => {}
        }
        self.free(table);
        self.report(slot);
        self.wake(now);
        Ok(())
    }

    /// The KV that stays of a sequence that ended is no longer needed.
    pub fn release(&mut self, now: f64, slot: u32) -> Result<(), C::Error> {
        self.catch_up(now)?;
        let table = self.at_mut(slot).table.take();
        self.free(table);
        self.forget_if_over(slot);
        self.wake(now);
        Ok(())
    }

    /// The reader made room for `tokens` more.
    pub fn give_credit(&mut self, now: f64, slot: u32, tokens: i64) -> Result<(), C::Error> {
        self.catch_up(now)?;
        let sequence = self.at_mut(slot);
        let was_out = sequence.leg.credit_tokens <= 0;
        sequence.leg.credit_tokens = sequence.leg.credit_tokens.saturating_add(tokens);
        if was_out && sequence.leg.credit_tokens > 0 {
            if sequence.state == State::Parked {
                sequence.state = State::Waiting;
                self.n_parked -= 1;
                self.waiting.push_front(slot);
            }
            self.wake(now);
        }
        Ok(())
    }

    /// The KV of a receiving sequence arrived, and the rest is computed here; or it never will, and all is.
    pub fn receive(&mut self, now: f64, slot: u32, arrived: bool) -> Result<(), C::Error> {
        self.catch_up(now)?;
        let sequence = self.at_mut(slot);
        let remote_tokens = std::mem::take(&mut sequence.leg.remote_tokens);
        if let (State::Receiving, Some(table)) = (sequence.state, sequence.table) {
            sequence.state = State::Ready;
            let n_tokens = sequence.n_tokens;
            if arrived {
                let computed_tokens = sequence.computed_tokens.max(remote_tokens.min(n_tokens - 1));
                sequence.computed_tokens = computed_tokens;
                sequence.prefilling = remote_tokens < n_tokens;
                self.commit(slot, table, computed_tokens.max(remote_tokens))?;
            }
            self.n_receiving -= 1;
            self.ready.push_back(slot);
        }
        self.wake(now);
        Ok(())
    }

    /// Reports the tokens that leaping left unsaid.
    pub fn report_pending(&mut self) {
        for at in 0..self.running.len() + self.waiting.len() {
            let slot = match self.running.get(at) {
                Some(&slot) => slot,
                None => self.waiting[at - self.running.len()],
            };
            if self.at(slot).pending_tokens > 0 {
                self.report(slot);
            }
        }
    }

    /// Every way in which the memory's books differ from what the sequences hold.
    pub fn check_integrity(&self) -> Vec<String> {
        let tables: Vec<u64> =
            self.sequences.iter().flatten().filter_map(|sequence| sequence.table).collect();
        self.kv.check_integrity(&tables)
    }

    fn at(&self, slot: u32) -> &Sequence<C> {
        self.sequences[slot as usize].as_ref().expect("a sequence that is here")
    }

    fn at_mut(&mut self, slot: u32) -> &mut Sequence<C> {
        self.sequences[slot as usize].as_mut().expect("a sequence that is here")
    }

    fn wake(&mut self, now: f64) {
        self.has_changed = true;
        self.wake_at_s.get_or_insert(now);
    }

    fn free(&mut self, table: Option<u64>) {
        if let Some(table) = table {
            self.kv.release(table);
        }
    }

    /// Frees what the sequences hold that just ended, but for KV that stays.
    fn free_ended(&mut self) {
        for at in 0..self.ended.len() {
            let sequence = self.at_mut(self.ended[at].slot);
            if !sequence.leg.pins_kv {
                let table = sequence.table.take();
                self.free(table);
            }
        }
    }

    fn report(&mut self, slot: u32) {
        let sequence = self.at_mut(slot);
        if !sequence.is_dirty {
            sequence.is_dirty = true;
            self.dirty.push(slot);
        }
    }

    fn forget_if_over(&mut self, slot: u32) {
        let sequence = self.at(slot);
        if sequence.state == State::Ended && sequence.table.is_none() && !sequence.is_dirty {
            self.sequences[slot as usize] = None;
            self.spare.push(slot);
        }
    }

    fn duration_s(&self, at: usize) -> f64 {
        self.steps_s[if self.steps_s.len() == 1 { 0 } else { at }]
    }

    fn begin(&mut self, now: f64) {
        let is_as_before = if self.config.plans_ahead {
            self.plan_ahead()
        } else {
            let mut work = std::mem::take(&mut self.work);
            work.clear();
            let is_as_before = self.plan(&mut work);
            self.work = work;
            is_as_before
        };
        if self.work.is_empty() {
            return;
        }
        let repeats = if self.config.leaps && is_as_before { self.repeats() } else { 1 };
        let mut load = StepLoad {
            utilisation: self.kv.active_blocks() as f64 / self.config.total_blocks as f64,
            ..StepLoad::default()
        };
        for &(slot, n_tokens) in &self.work {
            let sequence = self.at(slot);
            let computed = sequence.computed_tokens;
            if sequence.prefilling {
                load.prefill_tokens += n_tokens;
                load.attended += n_tokens * computed + n_tokens * (n_tokens + 1) / 2;
            } else {
                load.n_decoding += 1;
                load.kv_tokens += computed;
            }
        }
        let mut steps_s = std::mem::take(&mut self.steps_s);
        self.config.timing.steps_s(load, repeats, &mut steps_s);
        self.steps_s = steps_s;
        let ends_at_s = now + self.duration_s(0);
        let last_ends_at_s = (1..repeats).fold(ends_at_s, |at_s, step| at_s + self.duration_s(step));
        self.step = Some(Step { ends_at_s, last_ends_at_s, repeats });
        self.has_changed = true;
    }

    /// Computes the tokens of so many steps of the work; several only where all decode.
    fn compute(&mut self, repeats: usize) -> Result<(), C::Error> {
        self.has_changed = true;
        let block_size = self.config.block_size;
        let mut any_ended = false;
        let work = std::mem::take(&mut self.work);
        for &(slot, n_tokens) in &work {
            let sequence = self.at(slot);
            let Some(table) = sequence.table else { continue };
            if sequence.state != State::Running {
                continue;
            }
            if repeats > 1 {
                // none of these ends it; the block that they fill is known by their tokens
                self.generate(slot, repeats as u64 - 1)?;
            }
            let sequence = self.at_mut(slot);
            sequence.computed_tokens += n_tokens * repeats as u64;
            let computed = sequence.computed_tokens;
            if n_tokens > 1 || computed % block_size == 0 {
                self.commit(slot, table, computed)?;
            }
            if computed == self.at(slot).n_tokens {
                any_ended |= self.generate(slot, 1)?;
            }
        }
        self.work = work;
        if any_ended {
            let sequences = &self.sequences;
            self.running.retain(|&slot| {
                sequences[slot as usize].as_ref().is_some_and(|sequence| sequence.state == State::Running)
            });
        }
        Ok(())
    }

    fn commit(&mut self, slot: u32, table: u64, computed_tokens: u64) -> Result<(), C::Error> {
        if !self.config.prefix_caching {
            return Ok(());
        }
        let n_full = (computed_tokens / self.config.block_size) as usize;
        let sequence = self.sequences[slot as usize].as_mut().expect("a sequence that is here");
        sequence.hash_blocks(n_full)?;
        let committed = self.kv.commit(table, sequence.leg.hashes.iter().copied(), n_full);
        assert!(committed, "table {table} does not hold {n_full} blocks that have hashes");
        Ok(())
    }

    /// Generates so many tokens; true when the last of them ends the sequence.
    fn generate(&mut self, slot: u32, n_tokens: u64) -> Result<bool, C::Error> {
        let (now_s, leaps, block_size) = (self.now_s, self.config.leaps, self.config.block_size);
        let sequence = self.sequences[slot as usize].as_mut().expect("a sequence that is here");
        let first_s = *sequence.first_s.get_or_insert(now_s);
        sequence.prefilling = false;
        sequence.n_tokens += n_tokens;
        sequence.output_tokens += n_tokens;
        sequence.leg.credit_tokens -= n_tokens as i64;
        sequence.pending_tokens += n_tokens;
        let is_first = sequence.output_tokens == n_tokens;
        if sequence.output_tokens == sequence.leg.max_tokens {
            sequence.finish = Some(Finish::Length);
        } else if sequence.leg.may_stop && sequence.leg.content.stops(sequence.output_tokens)? {
            sequence.finish = Some(Finish::Stop);
        }
        let is_urgent = !leaps || is_first || sequence.finish.is_some() || sequence.leg.credit_tokens <= 0;
        if !is_urgent && sequence.n_tokens % block_size != 0 {
            return Ok(false); // its reader can wait for more
        }
        let is_over = sequence.finish.is_some();
        if is_over {
            sequence.state = State::Ended;
            self.ended.push(Ended {
                slot,
                first_s,
                last_s: now_s,
                output_tokens: sequence.output_tokens,
                cached_tokens: sequence.cached_tokens.unwrap_or(0),
            });
        }
        self.is_urgent |= is_urgent;
        self.report(slot);
        Ok(is_over)
    }
}
