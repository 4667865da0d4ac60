//! The approximate index: which slots may hold which blocks, predicted from routing decisions. A block counts as
//! held for a time after the last decision that sends it to a slot.
//!
//! A decision touches a prompt from its first block on, so along a prompt no block was touched later than the
//! ones before it, and the blocks that a later decision touched again are a prefix.
//!
//! The blocks of a dropped slot are at once the oldest, and over: they count for nothing, are removed in pieces as
//! expired ones are, and those that the slot's next rank touches are its own.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use crate::holders::{HolderSets, Holders, SLOTS_MAX};
use crate::overlap::{overlap, Mixer};
use crate::pages::PagePool;
use crate::table::Table;

/// A call removes at most this many old blocks, and as many as it adds: about a millisecond of its caller's time.
const PIECE: usize = 4096;

/// Neither a touch before the oldest one nor one after the newest.
const NONE: u32 = u32::MAX;

pub struct ApproximateIndex {
    blocks: Table<Holders>,
    sets: HolderSets,
    slots: Vec<Slot>,
    /// Linked by age; a touch is here while it is the last one of some block.
    touches: Vec<Touch>,
    oldest: u32,
    newest: u32,
    vacant: Vec<u32>,
    n_blocks: usize,
    /// Keys in `touches`, those that were touched again since included.
    n_listed: usize,
    /// There were more than `blocks_max`, and there are more than `blocks_after_prune` still.
    is_pruning: bool,
    pages: PagePool,
    mixer: Mixer,
    ttl_s: f64,
    blocks_max: usize,
    blocks_after_prune: usize,
}

#[derive(Default)]
struct Slot {
    /// Sequence key → place of its last touch in `touches`.
    last: Table<u32>,
    /// Touched since it was last dropped.
    in_use: bool,
}

struct Touch {
    slot: u32,
    older: u32,
    newer: u32,
    at_s: f64,
    /// Depth of the first key.
    depth: u32,
    /// Of how many keys this is the last touch; of half at least.
    n_last: u32,
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
            touches: Vec::new(),
            oldest: NONE,
            newest: NONE,
            vacant: Vec::new(),
            n_blocks: 0,
            n_listed: 0,
            is_pruning: false,
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
        if !sequence_hashes.is_empty() {
            self.insert(slot, sequence_hashes, now_s);
        }
        self.remove_old(now_s, PIECE + sequence_hashes.len());
    }

    /// Forgets blocks whose time is over, some thousands of them; returns how many.
    pub fn expire(&mut self, now_s: f64) -> usize {
        self.remove_old(now_s, PIECE)
    }

    fn insert(&mut self, slot: u32, sequence_hashes: &[u64], now_s: f64) {
        if self.slots.len() <= slot as usize {
            self.slots.resize_with(slot as usize + 1, Slot::default);
        }
        self.slots[slot as usize].in_use = true;
        let place = self.append(slot, now_s);
        let keys: Vec<u64> = sequence_hashes.iter().map(|&hash| self.mixer.key(hash)).collect();
        let mut n_last = 0;
        for &key in &keys {
            let mut last = None;
            self.slots[slot as usize].last.upsert(&mut self.pages, key, |old| {
                last = old;
                place
            });
            if last == Some(place) {
                continue; // two blocks of the prompt have one hash
            }
            n_last += 1;
            if let Some(last) = last {
                self.shorten(last);
                continue;
            }
            self.n_blocks += 1;
            let sets = &mut self.sets;
            self.blocks.upsert(&mut self.pages, key, |holders| match holders {
                None => Holders::one(slot),
                Some(holders) => sets.add(holders, slot),
            });
        }
        self.n_listed += keys.len();
        let touch = &mut self.touches[place as usize];
        (touch.keys, touch.n_last) = (keys, n_last);
    }

    /// Adds a touch without keys as the newest one; returns its place.
    fn append(&mut self, slot: u32, at_s: f64) -> u32 {
        let touch =
            Touch { slot, older: self.newest, newer: NONE, at_s, depth: 0, n_last: 0, keys: Vec::new() };
        let place = match self.vacant.pop() {
            Some(place) => {
                self.touches[place as usize] = touch;
                place
            }
            None => {
                self.touches.push(touch);
                self.touches.len() as u32 - 1
            }
        };
        match self.newest {
            NONE => self.oldest = place,
            newest => self.touches[newest as usize].newer = place,
        }
        self.newest = place;
        place
    }

    fn unlink(&mut self, place: u32) {
        let touch = &self.touches[place as usize];
        let (older, newer) = (touch.older, touch.newer);
        match older {
            NONE => self.oldest = newer,
            older => self.touches[older as usize].newer = newer,
        }
        match newer {
            NONE => self.newest = older,
            newer => self.touches[newer as usize].older = older,
        }
    }

    fn forget(&mut self, place: u32) {
        self.unlink(place);
        self.n_listed -= std::mem::take(&mut self.touches[place as usize].keys).len();
        self.vacant.push(place);
        if self.oldest == NONE {
            (self.touches, self.vacant) = (Vec::new(), Vec::new());
        }
    }

    /// A block of this touch was touched again. Once this was the last touch of fewer than half its keys, it lists
    /// only those.
    fn shorten(&mut self, place: u32) {
        let touch = &mut self.touches[place as usize];
        touch.n_last -= 1;
        if touch.n_last == 0 {
            self.forget(place);
        } else if 2 * (touch.n_last as usize) < touch.keys.len() {
            let held = &self.slots[touch.slot as usize].last;
            let n_listed = touch.keys.len();
            touch.keys = touch.keys.iter().copied().filter(|&key| held.get(key) == Some(place)).collect();
            let n_stale = n_listed - touch.keys.len();
            touch.depth += n_stale as u32;
            self.n_listed -= n_stale;
        }
    }

    /// Forgets expired blocks, and the least recently touched ones while there are too many, the deepest first
    /// among those touched at one time; `n_max` of them, or more where `blocks_max` needs it. Returns how many.
    fn remove_old(&mut self, now_s: f64, n_max: usize) -> usize {
        let before = self.n_blocks;
        let over_s = now_s - self.ttl_s;
        let mut left = n_max;
        while self.oldest != NONE && (left > 0 || self.n_blocks > self.blocks_max) {
            let place = self.oldest;
            let touch = &self.touches[place as usize];
            if touch.at_s <= over_s {
                self.remove_deepest(place);
                left = left.saturating_sub(1);
                continue;
            }
            self.is_pruning |= self.n_blocks > self.blocks_max;
            if !self.is_pruning || self.n_blocks <= self.blocks_after_prune {
                self.is_pruning = false;
                break;
            }
            left = self.prune_oldest(touch.at_s, left);
        }
        self.is_pruning &= self.oldest != NONE;
        let n_kept = self.slots.iter().rposition(|slot| slot.in_use || !slot.last.is_empty());
        self.slots.truncate(n_kept.map_or(0, |last| last + 1));
        before - self.n_blocks
    }

    /// Prunes among the touches at `at_s`, the oldest ones; returns how many of the `left` blocks are left.
    fn prune_oldest(&mut self, at_s: f64, mut left: usize) -> usize {
        let mut deepest = BinaryHeap::new();
        let mut place = self.oldest;
        while place != NONE && self.touches[place as usize].at_s <= at_s {
            let touch = &self.touches[place as usize];
            deepest.push((touch.depth as usize + touch.keys.len(), Reverse(deepest.len()), place));
            place = touch.newer;
        }
        while self.n_blocks > self.blocks_after_prune && (left > 0 || self.n_blocks > self.blocks_max) {
            let Some((depth, age, place)) = deepest.pop() else { break };
            left = left.saturating_sub(1);
            if self.remove_deepest(place) {
                deepest.push((depth - 1, age, place));
            }
        }
        left
    }

    /// Forgets the deepest block of a touch, unless it was touched again; returns whether the touch has more.
    fn remove_deepest(&mut self, place: u32) -> bool {
        let touch = &mut self.touches[place as usize];
        let (slot, key) =
            (touch.slot, touch.keys.pop().expect("a touch lists the blocks that it is last for"));
        self.n_listed -= 1;
        let held = &mut self.slots[slot as usize].last;
        if held.get(key) != Some(place) {
            return true;
        }
        held.remove(&mut self.pages, key);
        let sets = &mut self.sets;
        self.blocks.update(&mut self.pages, key, |holders| sets.remove(holders, slot));
        self.n_blocks -= 1;
        touch.n_last -= 1;
        if touch.n_last == 0 {
            self.forget(place);
            return false;
        }
        true
    }

    /// Fills `out[slot]` with how many leading blocks the slot may hold at `now_s`; false, filling nothing,
    /// when it is too short for the slots in use.
    #[must_use]
    pub fn overlap(&self, sequence_hashes: &[u64], now_s: f64, out: &mut [u32]) -> bool {
        if self.slots_in_use() > out.len() {
            return false;
        }
        if self.slots.len() > out.len() {
            let mut all = vec![0; self.slots.len()]; // a dropped slot behind those in use still has blocks
            self.fill(sequence_hashes, now_s, &mut all);
            out.copy_from_slice(&all[..out.len()]);
        } else {
            self.fill(sequence_hashes, now_s, out);
        }
        true
    }

    fn fill(&self, sequence_hashes: &[u64], now_s: f64, out: &mut [u32]) {
        overlap(&self.blocks, &self.sets, self.mixer, sequence_hashes, out);
        let over_s = now_s - self.ttl_s;
        if self.oldest != NONE && self.touches[self.oldest as usize].at_s <= over_s {
            for (slot, overlap) in self.slots.iter().zip(out) {
                let held = &sequence_hashes[..*overlap as usize];
                *overlap = held.partition_point(|&hash| {
                    let place =
                        slot.last.get(self.mixer.key(hash)).expect("an overlapping block was touched");
                    self.touches[place as usize].at_s > over_s
                }) as u32;
            }
        }
    }

    /// One more than the highest slot that was touched and not dropped.
    pub fn slots_in_use(&self) -> usize {
        self.slots.iter().rposition(|slot| slot.in_use).map_or(0, |last| last + 1)
    }

    /// Forgets a slot: its blocks count no more, and are removed as expired ones are, some thousands of them now.
    pub fn drop_slot(&mut self, slot: u32) {
        if !self.slots.get_mut(slot as usize).is_some_and(|slot| std::mem::take(&mut slot.in_use)) {
            return;
        }
        let mut place = self.oldest;
        while place != NONE {
            let newer = self.touches[place as usize].newer;
            if self.touches[place as usize].slot == slot {
                self.make_oldest(place);
            }
            place = newer;
        }
        self.remove_old(f64::NEG_INFINITY, PIECE);
    }

    /// Makes a touch older than any time.
    fn make_oldest(&mut self, place: u32) {
        self.unlink(place);
        let touch = &mut self.touches[place as usize];
        (touch.at_s, touch.older, touch.newer) = (f64::NEG_INFINITY, NONE, self.oldest);
        match self.oldest {
            NONE => self.newest = place,
            oldest => self.touches[oldest as usize].older = place,
        }
        self.oldest = place;
    }

    /// Blocks that are thought to be held, one for each slot.
    pub fn n_blocks(&self) -> usize {
        self.n_blocks
    }

    pub fn bytes(&self) -> usize {
        self.pages.used_bytes()
            + self.blocks.own_bytes()
            + self.sets.bytes()
            + self.slots.iter().map(|slot| size_of::<Slot>() + slot.last.own_bytes()).sum::<usize>()
            + self.touches.len() * size_of::<Touch>()
            + self.vacant.len() * size_of::<u32>()
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
        index.touch(2, &[9], 2.0);
        assert_eq!(index.n_blocks(), 5, "nothing is pruned below the limit");
    }

    #[test]
    fn a_shortened_touch_keeps_the_depth_of_its_blocks() {
        let mut index = ApproximateIndex::new(10.0, 8, 8, 5);
        index.touch(0, &[1, 2, 3, 4, 5], 0.0);
        index.touch(0, &[1, 2, 3], 0.0);
        index.touch(1, &[11, 12, 13, 14], 0.0);
        assert_eq!(overlaps(&index, &[1, 2, 3, 4, 5], 0.0), [4, 0, 0]);
        assert_eq!(overlaps(&index, &[11, 12, 13, 14], 0.0), [0, 4, 0]);
    }

    #[test]
    fn two_blocks_of_a_prompt_may_have_one_hash() {
        let mut index = ApproximateIndex::new(10.0, 100, 80, 5);
        index.touch(0, &[1, 2, 2, 1], 0.0);
        assert_eq!(overlaps(&index, &[1, 2, 2, 1], 0.0), [4, 0, 0]);
        assert_eq!((index.n_blocks(), index.n_listed), (2, 4));
        for second_s in [1.0, 11.0] {
            let mut repeated = ApproximateIndex::new(10.0, 3, 3, 5);
            repeated.touch(0, &[[1].as_slice(), &[2; 2 * PIECE]].concat(), 0.0);
            repeated.touch(0, &[3, 4, 5], second_s);
            assert_eq!(repeated.n_blocks(), 3, "the limit holds");
        }
        index.touch(0, &[1, 2, 2], 5.0);
        assert_eq!(index.expire(10.0), 0);
        assert_eq!(index.expire(15.0), 2);
        assert_eq!((index.n_blocks(), index.n_listed, index.touches.len()), (0, 0, 0));
    }

    #[test]
    fn what_is_touched_again_and_again_is_listed_a_few_times() {
        let mut index = ApproximateIndex::new(1e9, 100_000, 80_000, 5);
        let hashes: Vec<u64> = (0..1000).collect();
        for i in 0..1000 {
            index.touch(1, &hashes[..1000 - i % 7], f64::from(i as u32));
        }
        assert!(index.n_listed <= 2 * 1000 && index.touches.len() < 10);
        assert_eq!(overlaps(&index, &hashes, 1000.0), [0, 1000, 0]);
        index.touch(0, &hashes[..10], 1000.0);
        index.drop_slot(1);
        assert_eq!(index.expire(2e9), 10);
        assert_eq!(index.pages.used_bytes(), 0);
    }

    fn hashes(family: u64, n_blocks: u64) -> Vec<u64> {
        (1..=n_blocks).map(|depth| family << 32 | depth).collect()
    }

    #[test]
    fn expired_blocks_go_in_pieces_and_count_for_nothing_meanwhile() {
        let mut index = ApproximateIndex::new(10.0, 1 << 20, 1 << 19, 5);
        for family in 0..5 {
            index.touch(family as u32 % 2, &hashes(family, 10_000), 0.0);
        }
        index.touch(2, &hashes(9, 1), 11.0);
        assert_eq!(index.n_blocks(), 50_001 - (PIECE + 1));
        for family in 0..5 {
            assert_eq!(overlaps(&index, &hashes(family, 10_000), 11.0), [0, 0, 0]);
        }
        let mut n_calls = 0;
        while index.n_blocks() > 1 {
            assert!((1..=PIECE).contains(&index.expire(11.0)));
            n_calls += 1;
        }
        assert_eq!(n_calls, (50_000 - PIECE - 1usize).div_ceil(PIECE));
        assert_eq!(overlaps(&index, &hashes(9, 1), 11.0), [0, 0, 1]);
        assert_eq!(index.expire(21.0), 1);
        assert_eq!((index.pages.used_bytes(), index.n_listed, index.touches.capacity()), (0, 0, 0));
    }

    #[test]
    fn a_prune_that_removes_all_blocks_ends() {
        let mut index = ApproximateIndex::new(f64::INFINITY, 10, 0, 5);
        index.touch(0, &hashes(0, 11), 0.0);
        assert_eq!(index.n_blocks(), 0);
        index.touch(0, &hashes(1, 5), 1.0);
        assert_eq!(index.n_blocks(), 5);
    }

    #[test]
    fn a_dropped_slot_goes_in_pieces_and_counts_for_nothing_meanwhile() {
        for ttl_s in [10.0, f64::INFINITY] {
            let mut index = ApproximateIndex::new(ttl_s, 1 << 20, 1 << 19, 5);
            index.touch(0, &hashes(0, 10), 0.0);
            for family in 0..5 {
                index.touch(2, &hashes(family, 10_000), 1.0);
            }
            index.drop_slot(2);
            assert_eq!(index.n_blocks(), 50_010 - PIECE);
            assert_eq!(overlaps(&index, &hashes(0, 10_000), 1.0), [10, 0, 0]);
            let mut short = [7];
            assert!(index.overlap(&hashes(0, 10_000), 1.0, &mut short));
            assert_eq!(short, [10]);
            index.touch(2, &hashes(3, 20), 2.0);
            assert!(!index.overlap(&hashes(3, 10_000), 2.0, &mut short), "the slot is in use again");
            let mut n_calls = 0;
            while index.n_blocks() > 30 {
                assert_eq!(overlaps(&index, &hashes(0, 10_000), 2.0), [10, 0, 0]);
                assert_eq!(overlaps(&index, &hashes(3, 10_000), 2.0), [0, 0, 20]);
                assert!(index.expire(2.0) <= PIECE);
                n_calls += 1;
            }
            assert_eq!(n_calls, (50_010 - 2 * PIECE - 30usize).div_ceil(PIECE));
            assert_eq!(overlaps(&index, &hashes(3, 10_000), 2.0), [0, 0, 20]);
            index.drop_slot(2);
            index.drop_slot(0);
            assert_eq!((index.n_blocks(), index.slots.len(), index.n_listed), (0, 0, 0));
            assert_eq!((index.pages.used_bytes(), index.touches.capacity()), (0, 0));
        }
    }

    #[test]
    fn pruning_goes_in_pieces_and_the_limit_holds() {
        let mut index = ApproximateIndex::new(1e9, 60_000, 20_000, 5);
        let (mut removed, mut low) = (0, usize::MAX);
        for family in 0..100 {
            let before = index.n_blocks();
            index.touch(0, &hashes(family, 1000), family as f64);
            removed = removed.max(before + 1000 - index.n_blocks());
            assert!(index.n_blocks() <= 60_000);
            low = if family > 60 { low.min(index.n_blocks()) } else { low };
            assert_eq!(overlaps(&index, &hashes(family, 1000), family as f64), [1000, 0, 0]);
        }
        assert_eq!((removed, low), (PIECE + 1000, 20_000));
    }

    #[test]
    fn a_late_removal_changes_no_answer() {
        let mut index = ApproximateIndex::new(10.0, 1 << 20, 1 << 19, 5);
        let mut touched = std::collections::HashMap::new();
        let (mut now_s, mut random) = (0.0, 1u64);
        for _ in 0..400 {
            random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let (slot, family) = ((random >> 40) as u32 % 3, (random >> 50) % 40);
            let prompt = hashes(family, 1 + (random >> 33) % 3000);
            now_s += if random >> 60 == 0 { 12.0 } else { 0.05 };
            index.touch(slot, &prompt, now_s);
            touched.extend(prompt.iter().map(|&hash| ((slot, hash), now_s)));
            if random >> 20 & 15 == 0 {
                index.drop_slot((slot + 1) % 3);
                touched.retain(|&(of, _), _| of != (slot + 1) % 3);
            }
            let asked = hashes((family + 1) % 40, 3000);
            let expected: Vec<u32> = (0..3)
                .map(|slot| {
                    let held =
                        |hash: &u64| touched.get(&(slot, *hash)).is_some_and(|at_s| at_s + 10.0 > now_s);
                    asked.iter().take_while(|hash| held(hash)).count() as u32
                })
                .collect();
            assert_eq!(overlaps(&index, &asked, now_s), expected);
            assert!(index.n_listed <= 2 * index.n_blocks());
        }
    }
}
