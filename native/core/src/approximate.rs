//! The approximate index: which slots may hold which blocks, predicted from routing decisions. A block counts as
//! held for a time after the last decision that sends it to a slot.
//!
//! A decision touches a prompt from its first block on, so along a prompt no block was touched later than the
//! ones before it, and the blocks that a later decision touched again are a prefix.

use std::collections::VecDeque;

use crate::holders::{HolderSets, Holders, SLOTS_MAX};
use crate::overlap::{overlap, Mixer};
use crate::pages::PagePool;
use crate::table::Table;

/// Touched blocks may be listed twice as often as they are held, and this often besides.
const LISTED_SLACK: usize = 1 << 16;

pub struct ApproximateIndex {
    blocks: Table<Holders>,
    sets: HolderSets,
    /// For each slot, sequence key → number of the last touch.
    slots: Vec<Table<u32>>,
    /// Oldest first; the number of the first is `first_number`, and so on.
    touches: VecDeque<Touch>,
    first_number: u32,
    n_blocks: usize,
    /// Blocks in `touches`, those that were touched again or dropped since included.
    n_listed: usize,
    pages: PagePool,
    mixer: Mixer,
    ttl_s: f64,
    blocks_max: usize,
    blocks_after_prune: usize,
}

struct Touch {
    slot: u32,
    at_s: f64,
    /// Depth of the first key.
    depth: u32,
    keys: Vec<u64>,
}

impl ApproximateIndex {
    /// An empty index that forgets a block `ttl_s` after its last touch, and of more than `blocks_max` blocks
    /// all but `blocks_after_prune`. `secret` changes no answer.
    pub fn new(ttl_s: f64, blocks_max: usize, blocks_after_prune: usize, secret: u64) -> Self {
        ApproximateIndex {
            blocks: Table::default(),
            sets: HolderSets::default(),
            slots: Vec::new(),
            touches: VecDeque::new(),
            first_number: 0,
            n_blocks: 0,
            n_listed: 0,
            pages: PagePool::default(),
            mixer: Mixer::new(secret),
            ttl_s,
            blocks_max,
            blocks_after_prune,
        }
    }

    /// The prompt goes to `slot` at `now_s`.
    pub fn touch(&mut self, slot: u32, sequence_hashes: &[u64], now_s: f64) {
        assert!((slot as usize) < SLOTS_MAX, "slot {slot} is below {SLOTS_MAX}");
        self.expire(now_s);
        if sequence_hashes.is_empty() {
            return;
        }
        if self.slots.len() <= slot as usize {
            self.slots.resize_with(slot as usize + 1, Table::default);
        }
        let number = self.first_number.wrapping_add(self.touches.len() as u32);
        let keys: Vec<u64> = sequence_hashes.iter().map(|&hash| self.mixer.key(hash)).collect();
        let (pages, sets) = (&mut self.pages, &mut self.sets);
        for &key in &keys {
            let mut is_new = false;
            self.slots[slot as usize].upsert(pages, key, |old| {
                is_new = old.is_none();
                number
            });
            if is_new {
                self.n_blocks += 1;
                self.blocks.upsert(pages, key, |holders| match holders {
                    None => Holders::one(slot),
                    Some(holders) => sets.add(holders, slot),
                });
            }
        }
        self.n_listed += keys.len();
        self.touches.push_back(Touch { slot, at_s: now_s, depth: 0, keys });
        if self.n_blocks > self.blocks_max {
            self.prune();
        }
        if self.n_listed > 2 * self.n_blocks + LISTED_SLACK {
            self.compact();
        }
    }

    /// Forgets the blocks whose time is over; returns how many.
    pub fn expire(&mut self, now_s: f64) -> usize {
        let before = self.n_blocks;
        while self.touches.front().is_some_and(|touch| touch.at_s + self.ttl_s <= now_s) {
            let number = self.first_number;
            let touch = self.pop_front();
            for key in touch.keys {
                self.forget(touch.slot, key, number);
            }
        }
        before - self.n_blocks
    }

    fn pop_front(&mut self) -> Touch {
        let touch = self.touches.pop_front().expect("the caller saw a touch");
        self.first_number = self.first_number.wrapping_add(1);
        self.n_listed -= touch.keys.len();
        touch
    }

    /// Forgets a block if this touch was its last.
    fn forget(&mut self, slot: u32, key: u64, number: u32) {
        // A slot that was dropped may be beyond the end by now.
        let Some(held) = self.slots.get_mut(slot as usize).filter(|held| held.get(key) == Some(number))
        else {
            return;
        };
        held.remove(&mut self.pages, key);
        let sets = &mut self.sets;
        self.blocks.update(&mut self.pages, key, |holders| sets.remove(holders, slot));
        self.n_blocks -= 1;
    }

    /// Forgets the least recently touched blocks, the deepest first among those touched at one time.
    fn prune(&mut self) {
        while self.n_blocks > self.blocks_after_prune {
            let at_s = self.touches.front().expect("blocks were touched").at_s;
            let n_touches = self.touches.iter().take_while(|touch| touch.at_s <= at_s).count();
            let mut listed: Vec<(u32, usize)> = Vec::new();
            for (i, touch) in self.touches.iter().take(n_touches).enumerate() {
                listed.extend((0..touch.keys.len() as u32).map(|below| (touch.depth + below, i)));
            }
            listed.sort_unstable_by_key(|&(depth, i)| (std::cmp::Reverse(depth), i));
            for (_, i) in listed {
                if self.n_blocks <= self.blocks_after_prune {
                    return;
                }
                let number = self.first_number.wrapping_add(i as u32);
                let touch = &mut self.touches[i];
                let (slot, key) = (touch.slot, touch.keys.pop().expect("the deepest key is last"));
                self.n_listed -= 1;
                self.forget(slot, key, number);
            }
            for _ in 0..n_touches {
                self.pop_front();
            }
        }
    }

    /// Drops what is listed and no longer held, and renumbers the touches.
    fn compact(&mut self) {
        let touches = std::mem::take(&mut self.touches);
        let first_number = self.first_number;
        self.n_listed = 0;
        // New numbers begin after all old ones, so that neither is taken for the other.
        self.first_number = first_number.wrapping_add(touches.len() as u32);
        for (i, mut touch) in touches.into_iter().enumerate() {
            let old = first_number.wrapping_add(i as u32);
            let new = self.first_number.wrapping_add(self.touches.len() as u32);
            let Some(held) = self.slots.get_mut(touch.slot as usize) else { continue };
            let n_stale = touch.keys.iter().take_while(|&&key| held.get(key) != Some(old)).count();
            touch.keys = touch.keys.split_off(n_stale);
            touch.depth += n_stale as u32;
            for &key in &touch.keys {
                held.update(&mut self.pages, key, |number| Some(if number == old { new } else { number }));
            }
            if !touch.keys.is_empty() {
                self.n_listed += touch.keys.len();
                self.touches.push_back(touch);
            }
        }
    }

    /// Fills `out[slot]` with how many leading blocks the slot may hold at `now_s`; false, filling nothing,
    /// when it is too short for the slots in use.
    #[must_use]
    pub fn overlap(&self, sequence_hashes: &[u64], now_s: f64, out: &mut [u32]) -> bool {
        if self.slots.len() > out.len() {
            return false;
        }
        overlap(&self.blocks, &self.sets, self.mixer, sequence_hashes, out);
        if self.touches.front().is_some_and(|touch| touch.at_s + self.ttl_s <= now_s) {
            for (table, overlap) in self.slots.iter().zip(out) {
                let held = &sequence_hashes[..*overlap as usize];
                *overlap = held.partition_point(|&hash| {
                    let number = table.get(self.mixer.key(hash)).expect("an overlapping block was touched");
                    let touch = &self.touches[number.wrapping_sub(self.first_number) as usize];
                    touch.at_s + self.ttl_s > now_s
                }) as u32;
            }
        }
        true
    }

    /// One more than the highest slot that was touched and not dropped.
    pub fn slots_in_use(&self) -> usize {
        self.slots.len()
    }

    /// Forgets a slot; returns how many blocks it was thought to hold.
    pub fn drop_slot(&mut self, slot: u32) -> usize {
        let Some(held) = self.slots.get_mut(slot as usize) else { return 0 };
        let mut keys = Vec::with_capacity(held.len());
        held.for_each(|key, _| keys.push(key));
        held.clear(&mut self.pages);
        let sets = &mut self.sets;
        for &key in &keys {
            self.blocks.update(&mut self.pages, key, |holders| sets.remove(holders, slot));
        }
        self.n_blocks -= keys.len();
        if self.n_listed > 2 * self.n_blocks + LISTED_SLACK || self.n_blocks == 0 {
            self.compact();
        }
        let in_use = self.slots.iter().rposition(|held| !held.is_empty()).map_or(0, |last| last + 1);
        self.slots.truncate(in_use);
        keys.len()
    }

    /// Blocks that are thought to be held, one for each slot.
    pub fn n_blocks(&self) -> usize {
        self.n_blocks
    }

    pub fn bytes(&self) -> usize {
        self.pages.used_bytes()
            + self.blocks.own_bytes()
            + self.sets.bytes()
            + self.slots.iter().map(|held| size_of::<Table<u32>>() + held.own_bytes()).sum::<usize>()
            + self.touches.len() * size_of::<Touch>()
            + self.n_listed * size_of::<u64>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn overlaps(index: &ApproximateIndex, hashes: &[u64], now_s: f64) -> Vec<u32> {
        let mut out = vec![0; 3];
        assert!(index.overlap(hashes, now_s, &mut out));
        out
    }

    #[test]
    fn blocks_live_for_their_time() {
        let mut index = ApproximateIndex::new(10.0, 100, 80, 5);
        index.touch(0, &[1, 2, 3], 0.0);
        index.touch(0, &[1, 2], 5.0);
        index.touch(2, &[1], 6.0);
        assert_eq!(overlaps(&index, &[1, 2, 3], 9.0), [3, 0, 1]);
        assert_eq!(overlaps(&index, &[1, 2, 3], 10.0), [2, 0, 1]);
        assert_eq!(index.expire(10.0), 1);
        assert_eq!(overlaps(&index, &[1, 2, 3], 15.5), [0, 0, 1]);
        assert_eq!(index.expire(100.0), 3);
        assert_eq!((index.n_blocks(), index.n_listed, index.touches.len()), (0, 0, 0));
    }

    #[test]
    fn the_oldest_go_first_and_the_deepest_of_them() {
        let mut index = ApproximateIndex::new(10.0, 6, 4, 5);
        index.touch(0, &[1, 2, 3], 0.0);
        index.touch(1, &[1, 2], 0.0);
        index.touch(1, &[7, 8], 1.0);
        assert_eq!(overlaps(&index, &[1, 2, 3], 1.0), [1, 1, 0]);
        assert_eq!(overlaps(&index, &[7, 8], 1.0), [0, 2, 0]);
    }

    #[test]
    fn what_is_touched_again_and_again_is_listed_a_few_times() {
        let mut index = ApproximateIndex::new(1e9, 100_000, 80_000, 5);
        let hashes: Vec<u64> = (0..1000).collect();
        for i in 0..1000 {
            index.touch(1, &hashes[..1000 - i % 7], f64::from(i as u32));
        }
        assert!(index.n_listed <= 2 * 1000 + LISTED_SLACK);
        assert_eq!(overlaps(&index, &hashes, 1000.0), [0, 1000, 0]);
        index.touch(0, &hashes[..10], 1000.0);
        assert_eq!(index.drop_slot(1), 1000);
        assert_eq!(index.expire(2e9), 10);
        assert_eq!(index.pages.used_bytes(), 0);
    }
}
