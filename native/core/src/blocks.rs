//! The blocks of one medium: which slots hold each, and the code of 4 bytes that a rank keeps of it.
//!
//! A code is the leading bits of the sequence key, by which the block is found. A block that comes while another has the
//! same leading bits gets a number as its code instead, until nobody holds it any more.

use crate::holders::{HolderSets, Holders};
use crate::pages::PagePool;
use crate::shard::{prefix_of, PREFIX_BITS};
use crate::table::{Found, Place, Table};

/// Stands for one block as long as somebody holds it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Code(u32);

/// Marks a number; without it a code is leading bits.
const NUMBER: u32 = 1 << 31;

#[derive(Default)]
pub struct Blocks {
    holders: Table<Holders>,
    numbers: Numbers,
}

/// A block that is held: where it is, and its sequence key.
#[derive(Clone, Copy)]
pub struct Block {
    place: Place,
    pub sequence: u64,
}

impl Blocks {
    pub fn holders(&self) -> &Table<Holders> {
        &self.holders
    }

    /// Bytes outside the pages.
    pub fn own_bytes(&self) -> usize {
        self.holders.own_bytes() + self.numbers.of.own_bytes() + self.numbers.chunks_bytes()
    }

    /// Asks the processor to fetch what a change of the holders is likely to touch.
    #[inline]
    pub fn prefetch(&self, sequence: u64) {
        self.holders.prefetch(sequence);
    }

    #[inline]
    pub fn prefetch_code(&self, code: Code) {
        if code.0 & NUMBER == 0 {
            self.holders.prefetch(u64::from(code.0) << (64 - PREFIX_BITS));
        }
    }

    /// The block that a code stands for.
    ///
    /// # Panics
    /// When nobody holds it.
    #[inline]
    pub fn find(&self, code: Code) -> Block {
        let found = if code.0 & NUMBER == 0 {
            // of those with these leading bits one has no number
            self.holders.find_with_prefix(code.0, |sequence| self.numbers.of(sequence).is_none())
        } else {
            let sequence = self.numbers.sequence(code.0 & !NUMBER);
            match self.holders.find(sequence) {
                Found::At(place) => Some((place, sequence)),
                Found::Vacant { .. } => None,
            }
        };
        let (place, sequence) = found.expect("a code stands for a block that is held");
        Block { place, sequence }
    }

    /// Makes `slot` a holder. Returns the block's code, and whether the slot held it before.
    #[inline]
    pub fn add_holder(
        &mut self,
        pages: &mut PagePool,
        sets: &mut HolderSets,
        slot: u32,
        sequence: u64,
    ) -> (Code, bool) {
        let leading = prefix_of(sequence) as u32;
        match self.holders.find(sequence) {
            Found::At(place) => {
                let holders = self.holders.value(place, sequence);
                let joined = sets.add(holders, slot);
                self.holders.set_value(place, sequence, joined);
                (Code(self.numbers.of(sequence).map_or(leading, |number| number | NUMBER)), joined == holders)
            }
            Found::Vacant { place, is_clear } => {
                let has_slot = self.holders.insert(pages, place, sequence, Holders::one(slot));
                let is_alone = is_clear && has_slot;
                (Code(if is_alone { leading } else { self.numbers.add(pages, sequence) | NUMBER }), false)
            }
        }
    }

    /// Makes `slot` no holder any more.
    #[inline]
    pub fn remove_holder(&mut self, pages: &mut PagePool, sets: &mut HolderSets, slot: u32, block: Block) {
        let Block { place, sequence } = block;
        match sets.remove(self.holders.value(place, sequence), slot) {
            Some(left) => self.holders.set_value(place, sequence, left),
            None => {
                self.holders.remove_at(pages, place, sequence);
                self.numbers.remove(pages, sequence);
            }
        }
    }
}

const CHUNK: usize = 512;

/// Numbers of those few blocks that have one. A chunk is as large as a page, so that no growth moves much.
#[derive(Default)]
struct Numbers {
    /// Sequence key → number.
    of: Table<u32>,
    /// Number → sequence key, or the next free number.
    chunks: Vec<Box<[u64; CHUNK]>>,
    n_numbers: u32,
    /// One more than the first free number; 0 when there is none.
    free: u32,
}

impl Numbers {
    #[inline]
    fn of(&self, sequence: u64) -> Option<u32> {
        if self.of.is_empty() {
            return None;
        }
        self.of.get(sequence)
    }

    fn sequence(&self, number: u32) -> u64 {
        self.chunks[number as usize / CHUNK][number as usize % CHUNK]
    }

    fn entry(&mut self, number: u32) -> &mut u64 {
        &mut self.chunks[number as usize / CHUNK][number as usize % CHUNK]
    }

    #[cold]
    fn add(&mut self, pages: &mut PagePool, sequence: u64) -> u32 {
        let number = match self.free.checked_sub(1) {
            Some(number) => {
                self.free = self.sequence(number) as u32;
                number
            }
            None => {
                if self.n_numbers as usize % CHUNK == 0 {
                    self.chunks.push(Box::new([0; CHUNK]));
                }
                assert!(self.n_numbers < NUMBER, "fewer than 2^31 blocks have numbers");
                self.n_numbers += 1;
                self.n_numbers - 1
            }
        };
        *self.entry(number) = sequence;
        self.of.upsert(pages, sequence, |_| number);
        number
    }

    #[inline]
    fn remove(&mut self, pages: &mut PagePool, sequence: u64) {
        if self.of.is_empty() {
            return;
        }
        if let Some(number) = self.of.remove(pages, sequence) {
            *self.entry(number) = u64::from(self.free);
            self.free = number + 1;
            if self.of.is_empty() {
                *self = Numbers::default();
            }
        }
    }

    fn chunks_bytes(&self) -> usize {
        self.chunks.len() * size_of::<[u64; CHUNK]>()
            + self.chunks.capacity() * size_of::<Box<[u64; CHUNK]>>()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use crate::index::{Applied, BlockIndex, Event, IndexStats};
    use crate::overlap::Mixer;
    use crate::shard::PREFIX_BITS;

    const SLOTS: usize = 3;
    const SECRET: u64 = 99;

    fn draw(state: &mut u64, n: u64) -> u64 {
        *state = state.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(1);
        (*state >> 33) % n
    }

    #[test]
    fn blocks_of_equal_leading_bits_are_kept_apart() {
        let (mixer, mut index) = (Mixer::new(SECRET), BlockIndex::new(1 << 20, SECRET));
        let mut sequences = vec![mixer.hash(u64::MAX)];
        for leading in [0, 5, (1 << PREFIX_BITS) - 1] {
            sequences.extend((0..60).map(|last| mixer.hash(leading << (64 - PREFIX_BITS) | last)));
        }
        let mut twin: [BTreeMap<u64, (u64, usize)>; SLOTS] = Default::default();
        let mut state = 1;
        for step in 0..60_000 {
            let (slot, name) = (draw(&mut state, SLOTS as u64) as usize, draw(&mut state, 300));
            let sequence = sequences[draw(&mut state, sequences.len() as u64) as usize];
            let held = &mut twin[slot];
            // more stores than removals at first, then fewer
            if draw(&mut state, 10) < if step < 30_000 { 7 } else { 3 } {
                let stored = Event::Held { engine_hashes: &[name], sequence_hashes: &[sequence], medium: 0 };
                index.apply(slot as u32, &stored, &mut Applied::default());
                let (old, n_stores) = held.get(&name).copied().unwrap_or((sequence, 0));
                held.insert(name, (sequence, if old == sequence { n_stores + 1 } else { 1 }));
            } else {
                let removed = Event::Removed { engine_hashes: &[name], medium: 0 };
                index.apply(slot as u32, &removed, &mut Applied::default());
                match held.get_mut(&name) {
                    Some((_, n_stores)) if *n_stores > 1 => *n_stores -= 1,
                    _ => drop(held.remove(&name)),
                }
            }
            let mut out = [0; SLOTS];
            assert!(index.overlap(&[sequence], 0, &mut out));
            for (held, found) in twin.iter().zip(out) {
                assert_eq!(u32::from(held.values().any(|&(held, _)| held == sequence)), found);
            }
        }
        for (slot, held) in twin.iter().enumerate() {
            let listed =
                held.iter().flat_map(|(&name, &(sequence, n))| std::iter::repeat_n((name, sequence), n));
            let (names, sequences): (Vec<u64>, Vec<u64>) = listed.unzip();
            for column in index.dump(slot as u32) {
                assert_eq!((&column.engine_hashes, &column.sequence_hashes), (&names, &sequences));
            }
            assert_eq!(index.drop_rank(slot as u32), held.len());
        }
        assert_eq!(index.stats(), IndexStats::default());
    }
}
