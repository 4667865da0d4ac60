//! The plan of a step: who goes on, who gives way, and who gets a seat.

use super::{Scheduler, Wanting, Work};
use crate::sequence::{Content, State};

impl<C: Content> Scheduler<C> {
    /// Plans a step into `work`. Returns whether nothing but the number of tokens changed for it.
    pub(super) fn plan(&mut self, work: &mut Work) -> bool {
        let (active_blocks, n_running) = (self.kv.active_blocks(), self.running.len());
        let (budget, preempted) = self.continue_running(work);
        if !preempted || (work.is_empty() && self.work.is_empty()) {
            self.admit(work, budget);
        }
        active_blocks == self.kv.active_blocks()
            && work.len() == self.running.len()
            && self.running.len() == n_running
    }

    /// Has the step that was planned when the last began in `work`, and plans the one after it.
    ///
    /// A sequence that gives way to the latter is taken out of the former too, which may leave nothing of it.
    pub(super) fn plan_ahead(&mut self) -> bool {
        loop {
            let mut executing = std::mem::take(&mut self.planned);
            executing.retain(|&(slot, _)| self.at(slot).state == State::Running);
            self.work.clear();
            if executing.is_empty() {
                self.plan(&mut executing);
                if executing.is_empty() {
                    return false;
                }
                self.count_planned(&executing);
            }
            self.work = executing;
            let mut planned = Vec::new();
            let is_as_before = self.plan(&mut planned);
            self.count_planned(&planned);
            self.planned = planned;
            if !self.work.is_empty() {
                return is_as_before && self.work.len() == self.planned.len();
            }
        }
    }

    /// A step was planned ahead: counts its tokens, and those that it generates, with its sequences.
    fn count_planned(&mut self, work: &Work) {
        for &(slot, n_tokens) in work {
            let sequence = self.at_mut(slot);
            sequence.planned_tokens += n_tokens;
            let begun_tokens = sequence.computed_tokens + sequence.planned_tokens;
            sequence.planned_outputs +=
                u64::from(begun_tokens == sequence.n_tokens + sequence.planned_outputs);
        }
    }

    /// A step ended that was planned ahead; its tokens are not computed yet. Steps that were leapt over need none: as
    /// each of them began, another was planned.
    pub(super) fn settle(&mut self) {
        let work = std::mem::take(&mut self.work);
        for &(slot, n_tokens) in &work {
            let sequence = self.at_mut(slot);
            let generates = sequence.computed_tokens + n_tokens == sequence.n_tokens;
            sequence.planned_outputs -= u64::from(generates);
            sequence.planned_tokens -= n_tokens;
        }
        self.work = work;
    }

    /// How many steps are alike: while all decode, until the first sequence fills a block, generates its last token or
    /// runs out of credit, or will in the step after, if that is planned already. First tokens and such as may stop
    /// their sequence are worth a step of their own.
    pub(super) fn repeats(&self) -> usize {
        let block_size = self.config.block_size;
        let mut repeats = self.config.tokens_max;
        for &(slot, _) in &self.work {
            let sequence = self.at(slot);
            if sequence.prefilling || sequence.output_tokens == 0 || sequence.leg.may_stop {
                return 1;
            }
            repeats = repeats
                .min(block_size - sequence.computed_tokens % block_size)
                .min(sequence.leg.max_tokens - sequence.output_tokens)
                .min(sequence.leg.credit_tokens.max(0) as u64);
        }
        (if self.config.plans_ahead { repeats.saturating_sub(1) } else { repeats }).max(1) as usize
    }

    /// Plans the running sequences; returns the budget left and whether someone gave way.
    fn continue_running(&mut self, work: &mut Work) -> (u64, bool) {
        let (mut budget, block_size) = (self.config.tokens_max, self.config.block_size);
        let mut preempted = false;
        let mut in_turn = std::mem::take(&mut self.in_turn);
        in_turn.clear();
        in_turn.extend_from_slice(&self.running);
        for &slot in &in_turn {
            if budget == 0 || work.len() == self.config.seqs_max {
                break;
            }
            let sequence = self.at(slot);
            let outputs = sequence.planned_outputs;
            let Some(table) = sequence.table else { continue };
            if sequence.state != State::Running || sequence.leg.credit_tokens <= outputs as i64 {
                continue;
            }
            if sequence.output_tokens + outputs == sequence.leg.max_tokens {
                continue; // its last token is on its way
            }
            let begun_tokens = sequence.computed_tokens + sequence.planned_tokens;
            let n_tokens = (sequence.n_tokens + outputs - begun_tokens).min(budget);
            let needed_tokens = begun_tokens + n_tokens;
            if needed_tokens > sequence.room_tokens {
                let lacking = (needed_tokens - sequence.room_tokens).div_ceil(block_size) as usize;
                if !self.kv.can_grow(lacking) {
                    preempted = true;
                    if !self.make_room(slot, lacking) {
                        continue;
                    }
                }
                let n_blocks = self.kv.grow(table, lacking).ok().flatten().expect("room was made");
                self.at_mut(slot).room_tokens = n_blocks as u64 * block_size;
            }
            work.push((slot, n_tokens));
            budget -= n_tokens;
        }
        self.in_turn = in_turn;
        (budget, preempted)
    }

    /// Lets sequences give way until `n_blocks` fit; false when the needy one had to give way itself: now, or after the
    /// step that begins, if it is in that.
    fn make_room(&mut self, needy: u32, n_blocks: usize) -> bool {
        while !self.kv.can_grow(n_blocks) {
            let last = self.running.last().copied().expect("the needy one runs");
            let victim = self.paused().unwrap_or(last);
            if victim == needy && self.at(needy).planned_tokens > 0 {
                return false;
            }
            self.preempt(victim);
            if victim == needy {
                return false;
            }
        }
        true
    }

    fn paused(&self) -> Option<u32> {
        self.running.iter().rev().copied().find(|&slot| self.at(slot).leg.credit_tokens <= 0)
    }

    fn preempt(&mut self, slot: u32) {
        self.running.retain(|&other| other != slot);
        self.work.retain(|&(other, _)| other != slot);
        let sequence = self.at_mut(slot);
        let table = sequence.table.take();
        sequence.computed_tokens = 0;
        sequence.planned_tokens = 0;
        sequence.planned_outputs = 0;
        sequence.prefilling = true;
        if sequence.leg.credit_tokens <= 0 {
            sequence.state = State::Parked;
            self.n_parked += 1;
        } else {
            sequence.state = State::Waiting;
            self.waiting.push_front(slot);
        }
        self.free(table);
    }

    /// Gives seats and budget to sequences whose KV arrived, then to those that wait.
    fn admit(&mut self, work: &mut Work, mut budget: u64) {
        if self.ready.is_empty() && self.waiting.is_empty() {
            return;
        }
        let seated = self.running.iter().filter(|&&slot| self.at(slot).leg.credit_tokens > 0).count();
        let mut seats = self.config.seqs_max.saturating_sub(seated);
        while let Some(&slot) = self.ready.front().filter(|_| seats > 0) {
            let n_tokens = self.share(self.at(slot).remaining_tokens(), budget, work.is_empty());
            if n_tokens == 0 {
                return;
            }
            self.ready.pop_front();
            self.seat(slot, n_tokens, work);
            budget = budget.saturating_sub(n_tokens);
            seats -= 1;
        }
        while let Some(&slot) = self.waiting.front() {
            let n_matched = self.matched(slot);
            let sequence = self.at(slot);
            let remote_tokens = sequence.leg.remote_tokens;
            let mut n_tokens = 0;
            if remote_tokens == 0 {
                let new_tokens = sequence.n_tokens - n_matched as u64 * self.config.block_size;
                if seats > 0 {
                    n_tokens = self.share(new_tokens, budget, work.is_empty());
                }
                if n_tokens == 0 {
                    return;
                }
            }
            if !self.hold(slot, n_matched) {
                return;
            }
            self.waiting.pop_front();
            if remote_tokens > 0 {
                let sequence = self.at_mut(slot);
                sequence.state = State::Receiving;
                let kv_tokens = remote_tokens.saturating_sub(sequence.cached_tokens.unwrap_or(0));
                self.n_receiving += 1;
                self.wanting.push(Wanting { slot, kv_tokens });
                self.has_changed = true;
            } else {
                self.seat(slot, n_tokens, work);
                budget = budget.saturating_sub(n_tokens);
                seats -= 1;
            }
        }
    }

    /// How many of `new_tokens` a sequence gets of the budget. Without chunked prefill all or none, and what is over the
    /// whole budget (a long sequence that gave way) is computed alone.
    fn share(&self, new_tokens: u64, budget: u64, alone: bool) -> u64 {
        if self.config.chunked_prefill || new_tokens <= budget {
            new_tokens.min(budget)
        } else if alone {
            new_tokens
        } else {
            0
        }
    }

    /// How many cached blocks begin a sequence. Its last token is computed in any case, as its output is what is wanted;
    /// a leg whose whole KV comes from elsewhere computes it as its first decode step.
    fn matched(&self, slot: u32) -> usize {
        let sequence = self.at(slot);
        let is_all_remote = sequence.leg.remote_tokens >= sequence.n_tokens;
        let reusable = sequence.n_tokens - u64::from(!is_all_remote);
        self.kv.matched(sequence.leg.hashes.iter().copied(), (reusable / self.config.block_size) as usize)
    }

    /// Holds the blocks of all tokens; false when they do not fit, even if paused sequences give way.
    fn hold(&mut self, slot: u32, n_matched: usize) -> bool {
        let block_size = self.config.block_size;
        let n_tokens = self.at(slot).n_tokens;
        let n_blocks = n_tokens.div_ceil(block_size) as usize;
        let table = loop {
            let sequence = self.sequences[slot as usize].as_ref().expect("a sequence that is here");
            match self.kv.hold(sequence.leg.hashes.iter().copied(), n_matched, n_blocks - n_matched) {
                Some(table) => break table,
                None => match self.paused() {
                    Some(paused) => self.preempt(paused),
                    None => return false,
                },
            }
        };
        let cached_tokens = n_matched as u64 * block_size;
        let sequence = self.at_mut(slot);
        sequence.table = Some(table);
        sequence.room_tokens = n_blocks as u64 * block_size;
        sequence.computed_tokens = cached_tokens.min(n_tokens - 1);
        sequence.cached_tokens.get_or_insert(cached_tokens);
        true
    }

    fn seat(&mut self, slot: u32, n_tokens: u64, work: &mut Work) {
        self.at_mut(slot).state = State::Running;
        self.running.push(slot);
        self.seated.push((slot, self.now_s));
        work.push((slot, n_tokens));
    }
}
