//! The ledger: the load of each slot, in prefill tokens that wait or run, in blocks that running requests hold,
//! and in requests.

use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::Arc;

use hashbrown::HashMap;

use crate::paths::{NodeId, Paths};
use crate::prompt::Prompt;

/// Whose claim a lease is.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct LeaseKey {
    pub router_id: Box<str>,
    pub request_id: Box<str>,
    pub leg_number: u32,
}

/// A count for each slot. Readers see it change; one that was replaced stays as it was.
pub type Column = Arc<[AtomicI64]>;

pub struct Ledger {
    prefill_tokens: Column,
    active_blocks: Column,
    requests: Column,
    waiting: Column,
    leases: HashMap<u64, Lease>,
    by_key: HashMap<LeaseKey, u64>,
    paths: Paths,
    next_id: u64,
}

struct Lease {
    key: LeaseKey,
    slot: u32,
    prefill_tokens: i64,
    /// Its first token has not come.
    waits: bool,
    /// None when the lease holds no blocks.
    blocks: Option<Blocks>,
}

struct Blocks {
    prompt: Arc<Prompt>,
    path: Option<NodeId>,
    /// The partial tail and full blocks of output: nobody shares them.
    n_own: i64,
}

/// Why nothing was booked.
#[derive(PartialEq, Eq, Debug)]
pub enum NotBooked {
    LeaseExists,
    /// The slot has no place in the columns yet.
    NoSuchSlot,
    /// The slot's sum would not fit.
    TooMuch,
}

impl Ledger {
    pub fn new(n_slots: usize) -> Self {
        Ledger {
            prefill_tokens: zeros(n_slots),
            active_blocks: zeros(n_slots),
            requests: zeros(n_slots),
            waiting: zeros(n_slots),
            leases: HashMap::new(),
            by_key: HashMap::new(),
            paths: Paths::default(),
            next_id: 1,
        }
    }

    /// The slots that the columns have.
    pub fn n_slots(&self) -> usize {
        self.active_blocks.len()
    }

    pub fn prefill_tokens(&self) -> &Column {
        &self.prefill_tokens
    }

    pub fn active_blocks(&self) -> &Column {
        &self.active_blocks
    }

    /// Open leases.
    pub fn requests(&self) -> &Column {
        &self.requests
    }

    /// Open leases whose first token has not come.
    pub fn waiting(&self) -> &Column {
        &self.waiting
    }

    /// The number of open leases.
    pub fn len(&self) -> usize {
        self.leases.len()
    }

    pub fn is_empty(&self) -> bool {
        self.leases.is_empty()
    }

    /// The number of distinct runs of blocks.
    pub fn n_runs(&self) -> usize {
        self.paths.len()
    }

    /// Gives the columns at least `n_slots` places. True when they are new, so that views have to be taken
    /// again.
    pub fn ensure_slots(&mut self, n_slots: usize) -> bool {
        let grows = n_slots > self.n_slots();
        if grows {
            let n_slots = n_slots.next_power_of_two();
            let columns =
                [&mut self.prefill_tokens, &mut self.active_blocks, &mut self.requests, &mut self.waiting];
            for column in columns {
                let values = column.iter().map(|value| value.load(Ordering::Relaxed));
                *column = values.chain(std::iter::repeat(0)).take(n_slots).map(AtomicI64::new).collect();
            }
        }
        grows
    }

    /// Books `prefill_tokens` and, if `track_blocks`, the blocks of `prompt` at `slot`.
    ///
    /// # Errors
    /// When an open lease has the key, or the columns have no such slot.
    pub fn book(
        &mut self,
        key: LeaseKey,
        slot: u32,
        prompt: &Arc<Prompt>,
        prefill_tokens: i64,
        track_blocks: bool,
    ) -> Result<u64, NotBooked> {
        if slot as usize >= self.n_slots() {
            return Err(NotBooked::NoSuchSlot);
        }
        if self.by_key.contains_key(&key) {
            return Err(NotBooked::LeaseExists);
        }
        self.check_room(slot, prefill_tokens, prompt)?;
        let id = self.next_id;
        self.next_id += 1;
        let mut lease = Lease { key: key.clone(), slot, prefill_tokens, waits: true, blocks: None };
        add(&self.prefill_tokens, slot, prefill_tokens);
        self.count(&lease, 1);
        if track_blocks {
            let n_own = (prompt.total_blocks() - prompt.n_blocks()) as i64;
            let (path, n_new) = self.paths.hold(prompt, slot);
            add(&self.active_blocks, slot, n_own + i64::from(n_new));
            lease.blocks = Some(Blocks { prompt: Arc::clone(prompt), path, n_own });
        }
        self.by_key.insert(key, id);
        self.leases.insert(id, lease);
        Ok(id)
    }

    /// Sees that the slot's sums stay within their range with so many tokens, and all blocks of the prompt, more.
    fn check_room(&self, slot: u32, prefill_tokens: i64, prompt: &Prompt) -> Result<(), NotBooked> {
        let blocks = i64::try_from(prompt.total_blocks()).map_err(|_| NotBooked::TooMuch)?;
        self.check_sums(slot, prefill_tokens, blocks)
    }

    fn check_sums(&self, slot: u32, prefill_tokens: i64, blocks: i64) -> Result<(), NotBooked> {
        let fits = |column: &Column, more: i64| {
            column[slot as usize].load(Ordering::Relaxed).checked_add(more).is_some()
        };
        let fit = fits(&self.prefill_tokens, prefill_tokens) && fits(&self.active_blocks, blocks);
        if fit {
            Ok(())
        } else {
            Err(NotBooked::TooMuch)
        }
    }

    /// The open lease with this key.
    pub fn find(&self, key: &LeaseKey) -> Option<u64> {
        self.by_key.get(key).copied()
    }

    /// Prefill is over: its tokens are no load any more. False when the lease is not open.
    pub fn first_token(&mut self, id: u64) -> bool {
        let Some(lease) = self.leases.get_mut(&id) else { return false };
        add(&self.prefill_tokens, lease.slot, -lease.prefill_tokens);
        add(&self.waiting, lease.slot, -i64::from(lease.waits));
        lease.prefill_tokens = 0;
        lease.waits = false;
        true
    }

    /// Adds `n` full blocks of output. False when the lease is not open.
    ///
    /// # Errors
    /// When the slot's sum would not fit; nothing is added.
    pub fn output_block(&mut self, id: u64, n: u32) -> Result<bool, NotBooked> {
        let Some(lease) = self.leases.get(&id) else { return Ok(false) };
        self.check_sums(lease.slot, 0, i64::from(n))?;
        let Some(lease) = self.leases.get_mut(&id) else { return Ok(false) };
        if let Some(blocks) = &mut lease.blocks {
            blocks.n_own += i64::from(n);
            add(&self.active_blocks, lease.slot, i64::from(n));
        }
        Ok(true)
    }

    /// Ends a lease. False when it is not open.
    pub fn close(&mut self, id: u64) -> bool {
        let Some(lease) = self.leases.remove(&id) else { return false };
        self.by_key.remove(&lease.key);
        self.withdraw(&lease);
        if self.leases.is_empty() {
            self.leases = HashMap::new();
            self.by_key = HashMap::new();
        }
        true
    }

    /// Counts a lease at its slot, or with -1 no longer.
    fn count(&self, lease: &Lease, change: i64) {
        add(&self.requests, lease.slot, change);
        add(&self.waiting, lease.slot, change * i64::from(lease.waits));
    }

    fn withdraw(&mut self, lease: &Lease) {
        self.count(lease, -1);
        add(&self.prefill_tokens, lease.slot, -lease.prefill_tokens);
        if let Some(blocks) = &lease.blocks {
            let n_shared = blocks.path.map_or(0, |path| self.paths.let_go(path, lease.slot));
            add(&self.active_blocks, lease.slot, -blocks.n_own - i64::from(n_shared));
        }
    }

    /// Moves a lease and all its blocks to another slot, with `prefill_tokens` to do there. False when it is
    /// not open.
    ///
    /// # Errors
    /// When the columns have no such slot, or its sums would not fit; the lease stays where it is.
    pub fn move_to(&mut self, id: u64, slot: u32, prefill_tokens: i64) -> Result<bool, NotBooked> {
        if slot as usize >= self.n_slots() {
            return Err(NotBooked::NoSuchSlot);
        }
        let Some(lease) = self.leases.get(&id) else { return Ok(false) };
        let held = lease.blocks.as_ref().map_or(0, |blocks| blocks.n_own + blocks.prompt.n_blocks() as i64);
        self.check_sums(slot, prefill_tokens, held)?;
        let Some(mut lease) = self.leases.remove(&id) else { return Ok(false) };
        self.withdraw(&lease);
        lease.slot = slot;
        lease.prefill_tokens = prefill_tokens;
        add(&self.prefill_tokens, slot, prefill_tokens);
        self.count(&lease, 1);
        if let Some(blocks) = &mut lease.blocks {
            let (path, n_new) = self.paths.hold(&blocks.prompt, slot);
            blocks.path = path;
            add(&self.active_blocks, slot, blocks.n_own + i64::from(n_new));
        }
        self.leases.insert(id, lease);
        Ok(true)
    }

    /// Fills `out[slot]` with the blocks of `prompt` that running requests do not hold at the slot yet; a
    /// partial tail counts as one. The lease `exclude` counts as closed. Slots beyond the end of `out` are
    /// left out.
    pub fn not_active(&self, prompt: &Prompt, exclude: Option<u64>, out: &mut [u32]) {
        out.fill(u32::try_from(prompt.total_blocks()).unwrap_or(u32::MAX));
        let excluded = exclude.and_then(|id| {
            let lease = self.leases.get(&id)?;
            Some((&*lease.blocks.as_ref()?.prompt, lease.slot))
        });
        self.paths.subtract_held(prompt, excluded, out);
    }

    /// Closes every lease at `slot`; returns how many.
    pub fn drop_slot(&mut self, slot: u32) -> usize {
        self.close_where(|lease| lease.slot == slot)
    }

    /// Closes every lease of a router; returns how many.
    pub fn drop_router(&mut self, router_id: &str) -> usize {
        self.close_where(|lease| &*lease.key.router_id == router_id)
    }

    fn close_where(&mut self, doomed: impl Fn(&Lease) -> bool) -> usize {
        let ids: Vec<u64> =
            self.leases.iter().filter(|(_, lease)| doomed(lease)).map(|(&id, _)| id).collect();
        ids.iter().for_each(|&id| {
            self.close(id);
        });
        ids.len()
    }
}

fn zeros(n_slots: usize) -> Column {
    (0..n_slots).map(|_| AtomicI64::new(0)).collect()
}

/// Only the ledger's owner writes, so a load and a store do.
fn add(column: &Column, slot: u32, change: i64) {
    let value = &column[slot as usize];
    value.store(value.load(Ordering::Relaxed) + change, Ordering::Relaxed);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hashing::SEED;

    fn key(request: &str) -> LeaseKey {
        LeaseKey { router_id: "r".into(), request_id: request.into(), leg_number: 0 }
    }

    fn prompt(tokens: &[u32]) -> Arc<Prompt> {
        Arc::new(Prompt::new(tokens, 2, SEED, &[]))
    }

    fn active(ledger: &Ledger) -> Vec<i64> {
        ledger.active_blocks().iter().map(|value| value.load(Ordering::Relaxed)).collect()
    }

    #[test]
    fn shared_blocks_count_once_and_drain_to_zero() {
        let mut ledger = Ledger::new(2);
        let long = prompt(&[1, 1, 2, 2, 3, 3, 4]);
        let fork = prompt(&[1, 1, 2, 2, 9, 9]);
        let short = prompt(&[1, 1]);
        let a = ledger.book(key("a"), 0, &long, 7, true).unwrap();
        assert_eq!(active(&ledger), [4, 0]);
        let b = ledger.book(key("b"), 0, &fork, 2, true).unwrap();
        assert_eq!(active(&ledger), [5, 0]);
        let c = ledger.book(key("c"), 1, &short, 2, true).unwrap();
        assert_eq!(active(&ledger), [5, 1]);
        assert_eq!(ledger.book(key("c"), 1, &short, 2, true), Err(NotBooked::LeaseExists));
        let mut out = [9, 9];
        ledger.not_active(&long, None, &mut out);
        assert_eq!(out, [1, 3]);
        ledger.not_active(&long, Some(a), &mut out);
        assert_eq!(out, [2, 3]);
        assert_eq!(ledger.move_to(b, 1, 0), Ok(true));
        assert_eq!(active(&ledger), [4, 3]);
        assert_eq!(ledger.output_block(b, 2), Ok(true));
        assert!(ledger.close(a) && ledger.close(b) && ledger.close(c) && !ledger.close(c));
        assert_eq!(active(&ledger), [0, 0]);
        assert_eq!(ledger.n_runs(), 0);
    }

    #[test]
    fn requests_count_until_they_end_and_wait_until_their_first_token() {
        let counts = |column: &Column| -> Vec<i64> {
            column.iter().map(|value| value.load(Ordering::Relaxed)).collect()
        };
        let mut ledger = Ledger::new(2);
        let prompt = prompt(&[1, 1]);
        let a = ledger.book(key("a"), 0, &prompt, 2, true).unwrap();
        let b = ledger.book(key("b"), 0, &prompt, 0, false).unwrap();
        assert_eq!((counts(ledger.requests()), counts(ledger.waiting())), (vec![2, 0], vec![2, 0]));
        assert!(ledger.first_token(a) && ledger.first_token(a));
        assert_eq!((counts(ledger.requests()), counts(ledger.waiting())), (vec![2, 0], vec![1, 0]));
        assert_eq!(ledger.move_to(a, 1, 0), Ok(true));
        assert_eq!(ledger.move_to(b, 1, 0), Ok(true));
        assert_eq!((counts(ledger.requests()), counts(ledger.waiting())), (vec![0, 2], vec![0, 1]));
        assert!(ledger.close(b) && ledger.close(a) && !ledger.close(a));
        assert_eq!((counts(ledger.requests()), counts(ledger.waiting())), (vec![0, 0], vec![0, 0]));
    }

    #[test]
    fn sums_that_would_not_fit_are_refused_and_change_nothing() {
        let mut ledger = Ledger::new(2);
        let prompt = prompt(&[1, 1]);
        let a = ledger.book(key("a"), 0, &prompt, i64::MAX, true).unwrap();
        assert_eq!(ledger.book(key("b"), 0, &prompt, 1, true), Err(NotBooked::TooMuch));
        let b = ledger.book(key("b"), 1, &prompt, 1, true).unwrap();
        assert_eq!(ledger.move_to(b, 0, 1), Err(NotBooked::TooMuch));
        assert_eq!(ledger.move_to(b, 0, 0), Ok(true));
        assert!(ledger.close(a) && ledger.close(b));
        assert_eq!(active(&ledger), [0, 0]);
    }
}
