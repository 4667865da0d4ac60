//! The block index: which slots hold which blocks, by the engines' events.
//!
//! For each medium, one table over all ranks maps sequence hashes to holders, and one table a rank maps the
//! engine's hashes to codes of those blocks. Engine hashes are opaque: two ranks may call one block by two names,
//! and two blocks by one.

use crate::blocks::Blocks;
pub use crate::events::{Applied, Event, HeldColumns};
use crate::hashing::chain;
use crate::holders::HolderSets;
pub use crate::holders::SLOTS_MAX;
use crate::overlap::{overlap, Mixer};
use crate::pages::PagePool;
use crate::rank::{Held, Placed, Rank, TakenBack};
use std::ops::Range;

/// GPU, CPU, disk, external.
pub const MEDIA: usize = 4;

/// Blocks whose places are fetched together before they are written.
const TOGETHER: usize = 32;

/// A place within a dump: the medium, and in so many low bits the part of its table.
const PART_BITS: u32 = 32;
const PART_MAX: u64 = 1 << PART_BITS;

#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct IndexStats {
    /// Held blocks, one for each engine hash of each rank.
    pub blocks: [usize; MEDIA],
    /// Distinct sequence hashes.
    pub sequences: [usize; MEDIA],
    pub ranks: usize,
    pub bytes: usize,
}

pub struct BlockIndex {
    media: [Medium; MEDIA],
    pages: PagePool,
    mixer: Mixer,
    blocks_per_rank_max: usize,
    chained: Vec<u64>,
}

#[derive(Default)]
struct Medium {
    blocks: Blocks,
    sets: HolderSets,
    ranks: Vec<Option<Box<Rank>>>,
}

impl BlockIndex {
    /// An empty index. `secret` spreads the hashes over the tables and changes no answer.
    pub fn new(blocks_per_rank_max: usize, secret: u64) -> Self {
        BlockIndex {
            media: Default::default(),
            pages: PagePool::default(),
            mixer: Mixer::new(secret),
            blocks_per_rank_max,
            chained: Vec::new(),
        }
    }

    /// Applies one event of the rank at `slot`, and counts what became of its blocks.
    ///
    /// # Panics
    /// When the slot or the medium is out of range, or columns differ in length.
    pub fn apply(&mut self, slot: u32, event: &Event<'_>, applied: &mut Applied) {
        assert!((slot as usize) < SLOTS_MAX, "slot {slot} is below {SLOTS_MAX}");
        match *event {
            Event::Stored { parent, engine_hashes, block_hashes, medium } => {
                let parent = match parent {
                    None => None,
                    Some(name) => match self.sequence_of(slot, name, medium) {
                        Some(sequence) => Some(sequence),
                        None => {
                            applied.orphaned += engine_hashes.len() as u64;
                            return;
                        }
                    },
                };
                let mut chained = std::mem::take(&mut self.chained);
                chained.clear();
                chained.extend(block_hashes.iter().scan(parent, |previous, &block| {
                    *previous = Some(chain(*previous, block));
                    *previous
                }));
                self.store(slot, medium, engine_hashes, &chained, applied);
                self.chained = chained;
            }
            Event::Held { engine_hashes, sequence_hashes, medium } => {
                self.store(slot, medium, engine_hashes, sequence_hashes, applied);
            }
            Event::Removed { engine_hashes, medium } => self.remove(slot, medium, engine_hashes, applied),
            Event::Cleared => applied.cleared += self.drop_rank(slot) as u64,
        }
    }

    /// The sequence hash that the rank calls `name`: in this medium, or in any other.
    fn sequence_of(&self, slot: u32, name: u64, medium: usize) -> Option<u64> {
        let key = self.mixer.key(name);
        let in_medium = |medium: usize| {
            let Medium { blocks, .. } = &self.media[medium];
            Some(blocks.find(self.media[medium].rank(slot)?.names.get(key)?).sequence)
        };
        let found = in_medium(medium).or_else(|| (0..MEDIA).find_map(in_medium))?;
        Some(self.mixer.hash(found))
    }

    fn store(&mut self, slot: u32, medium: usize, names: &[u64], sequences: &[u64], applied: &mut Applied) {
        assert_eq!(names.len(), sequences.len(), "one sequence hash for each engine hash");
        if names.is_empty() {
            return;
        }
        let Medium { blocks, sets, ranks } = &mut self.media[medium];
        if ranks.len() <= slot as usize {
            ranks.resize_with(slot as usize + 1, || None);
        }
        let rank = ranks[slot as usize].get_or_insert_default();
        let (mut held, mixer) = (Held { pages: &mut self.pages, blocks, sets, slot }, self.mixer);
        let mut keys = [(0, 0); TOGETHER];
        for (names, sequences) in names.chunks(TOGETHER).zip(sequences.chunks(TOGETHER)) {
            for ((key, &name), &sequence) in keys.iter_mut().zip(names).zip(sequences) {
                *key = (mixer.key(name), mixer.key(sequence));
                rank.names.prefetch(key.0);
                held.blocks.prefetch(key.1);
            }
            for &(name, sequence) in &keys[..names.len()] {
                match rank.store(&mut held, name, sequence, self.blocks_per_rank_max) {
                    Placed::OverLimit => applied.over_limit += 1,
                    Placed::Repeated => applied.repeated += 1,
                    Placed::New => applied.stored += 1,
                    Placed::Instead => applied.replaced += 1,
                }
            }
        }
    }

    fn remove(&mut self, slot: u32, medium: usize, names: &[u64], applied: &mut Applied) {
        let Medium { blocks, sets, ranks } = &mut self.media[medium];
        let Some(rank) = ranks.get_mut(slot as usize).and_then(Option::as_deref_mut) else {
            applied.unknown_removed += names.len() as u64;
            return;
        };
        let (mut held, mixer) = (Held { pages: &mut self.pages, blocks, sets, slot }, self.mixer);
        for names in names.chunks(TOGETHER) {
            for &name in names {
                rank.names.prefetch(mixer.key(name));
            }
            let (mut given_up, mut n_given_up) = ([None; TOGETHER], 0);
            for &name in names {
                match rank.take_back(held.pages, mixer.key(name)) {
                    TakenBack::Unknown => applied.unknown_removed += 1,
                    TakenBack::StillStored => applied.removed += 1,
                    TakenBack::Last(code) => {
                        applied.removed += 1;
                        held.blocks.prefetch_code(code);
                        given_up[n_given_up] = Some(code);
                        n_given_up += 1;
                    }
                }
            }
            for code in given_up.into_iter().flatten() {
                rank.give_up(&mut held, code);
            }
        }
        if rank.names.is_empty() {
            self.media[medium].forget_rank(slot);
        }
    }

    /// Removes everything that the rank at `slot` holds; returns how many blocks that were.
    pub fn drop_rank(&mut self, slot: u32) -> usize {
        let mut n_blocks = 0;
        loop {
            match self.drop_some(slot) {
                0 => return n_blocks,
                n_dropped => n_blocks += n_dropped,
            }
        }
    }

    /// Removes some of what the rank at `slot` holds, a few thousand blocks at most; returns how many, 0 when it
    /// holds nothing any more.
    pub fn drop_some(&mut self, slot: u32) -> usize {
        for medium in &mut self.media {
            let Some(rank) = medium.ranks.get_mut(slot as usize).and_then(Option::as_deref_mut) else {
                continue;
            };
            let (blocks, sets) = (&mut medium.blocks, &mut medium.sets);
            let mut held = Held { pages: &mut self.pages, blocks, sets, slot };
            let taken = rank.take_some(held.pages);
            for together in taken.chunks(TOGETHER) {
                for &(_, code) in together {
                    held.blocks.prefetch_code(code);
                }
                for &(_, code) in together {
                    rank.give_up(&mut held, code);
                }
            }
            if rank.names.is_empty() {
                medium.forget_rank(slot);
            }
            return taken.len();
        }
        0
    }

    /// Fills `out` with the overlap of every slot; false, filling nothing, when it is too short for the slots
    /// in use.
    #[must_use]
    pub fn overlap(&self, sequence_hashes: &[u64], medium: usize, out: &mut [u32]) -> bool {
        let medium = &self.media[medium];
        let fits = medium.ranks.len() <= out.len();
        if fits {
            overlap(medium.blocks.holders(), &medium.sets, self.mixer, sequence_hashes, out);
        }
        fits
    }

    /// One more than the highest slot that holds blocks in the medium.
    pub fn slots_in_use(&self, medium: usize) -> usize {
        self.media[medium].ranks.len()
    }

    /// The blocks of the rank at `slot`, by medium and rising engine hash; a block stored n times is listed n
    /// times.
    pub fn dump(&self, slot: u32) -> Vec<HeldColumns> {
        let parts_of = |medium: &Medium| medium.rank(slot).map_or(0, |rank| rank.names.n_parts());
        let each = self.media.iter().enumerate().filter(|(_, held)| held.rank(slot).is_some());
        each.map(|(medium, held)| self.listed(slot, medium, 0..parts_of(held))).collect()
    }

    /// Some of what the rank at `slot` holds, a few thousand names at most, and the place where the rest begins;
    /// None after the last part. The first place is 0. All parts together are what `dump` gives, in another order,
    /// if nothing was applied to the rank meanwhile.
    pub fn dump_some(&self, slot: u32, place: u64) -> Option<(HeldColumns, u64)> {
        let (first_medium, mut part) = ((place >> PART_BITS) as usize, (place & (PART_MAX - 1)) as usize);
        for medium in first_medium..MEDIA {
            let n_parts = self.media[medium].rank(slot).map_or(0, |rank| rank.names.n_parts());
            if part < n_parts {
                let place = (medium as u64) << PART_BITS | (part as u64 + 1);
                return Some((self.listed(slot, medium, part..part + 1), place));
            }
            part = 0;
        }
        None
    }

    /// What the rank at `slot`, which holds something in the medium, has in some parts of its table, by rising
    /// engine hash.
    fn listed(&self, slot: u32, medium: usize, parts: Range<usize>) -> HeldColumns {
        let held = &self.media[medium];
        let rank = held.rank(slot).expect("the rank holds blocks in the medium");
        let mut pairs = Vec::new();
        for part in parts {
            rank.names.for_each_in(part, |name, code| {
                let pair = (self.mixer.hash(name), self.mixer.hash(held.blocks.find(code).sequence));
                pairs.extend(std::iter::repeat_n(pair, rank.n_stores(name)));
            });
        }
        pairs.sort_unstable();
        let (engine_hashes, sequence_hashes) = pairs.into_iter().unzip();
        HeldColumns { medium, engine_hashes, sequence_hashes }
    }

    /// How many blocks the rank at `slot` holds in the medium.
    pub fn held(&self, slot: u32, medium: usize) -> usize {
        self.media[medium].rank(slot).map_or(0, |rank| rank.names.len())
    }

    pub fn stats(&self) -> IndexStats {
        let mut stats = IndexStats { bytes: self.pages.used_bytes(), ..IndexStats::default() };
        let mut holds = vec![false; self.media.iter().map(|medium| medium.ranks.len()).max().unwrap_or(0)];
        for (i, medium) in self.media.iter().enumerate() {
            stats.sequences[i] = medium.blocks.holders().len();
            stats.bytes += medium.blocks.own_bytes() + medium.sets.bytes();
            stats.bytes += medium.ranks.capacity() * size_of::<Option<Box<Rank>>>();
            for (slot, rank) in medium.ranks.iter().enumerate() {
                if let Some(rank) = rank {
                    holds[slot] = true;
                    stats.blocks[i] += rank.names.len();
                    stats.bytes += rank.bytes();
                }
            }
        }
        stats.ranks = holds.into_iter().filter(|&holds| holds).count();
        stats
    }
}

impl Medium {
    fn rank(&self, slot: u32) -> Option<&Rank> {
        self.ranks.get(slot as usize)?.as_deref()
    }

    fn forget_rank(&mut self, slot: u32) {
        self.ranks[slot as usize] = None;
        let in_use = self.ranks.iter().rposition(Option::is_some).map_or(0, |last| last + 1);
        self.ranks.truncate(in_use);
        if in_use == 0 {
            self.ranks = Vec::new();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn store(
        index: &mut BlockIndex,
        slot: u32,
        parent: Option<u64>,
        names: &[u64],
        blocks: &[u64],
    ) -> Applied {
        let mut applied = Applied::default();
        let event = Event::Stored { parent, engine_hashes: names, block_hashes: blocks, medium: 0 };
        index.apply(slot, &event, &mut applied);
        applied
    }

    fn remove(index: &mut BlockIndex, slot: u32, names: &[u64]) -> Applied {
        let mut applied = Applied::default();
        index.apply(slot, &Event::Removed { engine_hashes: names, medium: 0 }, &mut applied);
        applied
    }

    fn overlaps(index: &BlockIndex, blocks: &[u64], n_slots: usize) -> Vec<u32> {
        let mut out = vec![7; n_slots];
        assert!(index.overlap(&crate::hashing::sequence_hashes(blocks), 0, &mut out));
        out
    }

    #[test]
    fn the_longest_contiguous_prefix_counts() {
        let mut index = BlockIndex::new(1 << 20, 99);
        let blocks: Vec<u64> = (100..140).collect();
        let names: Vec<u64> = (0..40).collect();
        for slot in 0..200 {
            let n = (slot as usize * 7) % 41;
            store(&mut index, slot, None, &names[..n], &blocks[..n]);
        }
        let expected: Vec<u32> = (0..200).map(|slot| (slot * 7) % 41).chain([0]).collect();
        assert_eq!(overlaps(&index, &blocks, 201), expected);
        assert_eq!(remove(&mut index, 5, &[20]).removed, 1);
        assert_eq!(overlaps(&index, &blocks, 201)[5], 20);
        store(&mut index, 5, Some(19), &[20], &blocks[20..21]);
        assert_eq!(overlaps(&index, &blocks, 201), expected);
        for slot in 0..200 {
            if slot % 2 == 0 {
                index.drop_rank(slot);
            } else {
                while index.drop_some(slot) > 0 {}
            }
        }
        assert_eq!(index.stats(), IndexStats::default());
    }

    #[test]
    fn two_names_for_one_block_and_one_name_for_two() {
        let mut index = BlockIndex::new(1 << 20, 99);
        store(&mut index, 0, None, &[1], &[50]);
        store(&mut index, 0, None, &[2], &[50]);
        remove(&mut index, 0, &[1]);
        assert_eq!(overlaps(&index, &[50], 1), [1]);
        assert_eq!(store(&mut index, 0, None, &[2], &[60]).replaced, 1);
        assert_eq!(overlaps(&index, &[50], 1), [0]);
        assert_eq!(overlaps(&index, &[60], 1), [1]);
        remove(&mut index, 0, &[2]);
        assert_eq!(index.stats(), IndexStats::default());
    }

    #[test]
    fn a_rank_over_its_limit_holds_no_more() {
        let mut index = BlockIndex::new(2, 99);
        let applied = store(&mut index, 0, None, &[1, 2, 3, 1], &[50, 60, 70, 50]);
        assert_eq!((applied.stored, applied.over_limit), (2, 1));
        assert_eq!(index.held(0, 0), 2);
    }

    #[test]
    fn rows_of_numbers_are_spread_under_any_secret() {
        let rows = |first: u64| (0..20_000).map(|i| 3 * i + first).collect::<Vec<u64>>();
        let (names, sequences) = (rows(5), rows(7));
        for secret in 0..500 {
            let mut index = BlockIndex::new(1 << 20, secret);
            let event = Event::Held { engine_hashes: &names, sequence_hashes: &sequences, medium: 0 };
            index.apply(0, &event, &mut Applied::default());
            assert_eq!(index.held(0, 0), names.len());
        }
    }
}
