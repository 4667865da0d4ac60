//! Sets of slots, each kept once: the blocks of a run have the same holders, so equal sets get equal codes.
//!
//! One or two holders live in the code itself. More are an interned set, counted by the blocks that have it:
//! a sorted list while it is small, a bitset when that is smaller.

use hashbrown::HashTable;

/// Slots are below this.
pub const SLOTS_MAX: usize = 1 << 16;

/// The code of a non-empty set of slots. Equal codes from one pool are equal sets, and the other way round.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Holders(u32);

const TWO: u32 = 1 << 30;
const MANY: u32 = 2 << 30;
const KIND: u32 = 3 << 30;
const PAIR_BITS: u32 = 15;
const PAIR_SLOTS: u32 = 1 << PAIR_BITS;

/// A set of slots, as its kind of code stores it.
pub enum Members<'a> {
    One(u32),
    Two(u32, u32),
    List(&'a [u16]),
    /// Bit `slot % 64` of word `slot / 64`.
    Bits(&'a [u64]),
}

#[derive(PartialEq, Eq)]
enum Stored {
    List(Box<[u16]>),
    Bits(Box<[u64]>),
}

struct Set {
    /// How many blocks have this set; at 0 the place is free.
    n_blocks: u32,
    fingerprint: u64,
    stored: Stored,
}

/// The sets of more than two slots that some block has.
#[derive(Default)]
pub struct HolderSets {
    sets: Vec<Set>,
    free: Vec<u32>,
    by_fingerprint: HashTable<u32>,
    stored_bytes: usize,
    /// The last change of a set: (from, slot, to). Blocks of a run change alike.
    last_added: Option<(Holders, u32, Holders)>,
    last_removed: Option<(Holders, u32, Holders)>,
}

impl Holders {
    pub fn one(slot: u32) -> Self {
        Holders(slot)
    }
}

impl HolderSets {
    /// Bytes of all interned sets.
    pub fn bytes(&self) -> usize {
        self.stored_bytes
            + self.sets.capacity() * size_of::<Set>()
            + self.free.capacity() * size_of::<u32>()
            + self.by_fingerprint.capacity() * (size_of::<u32>() + 1)
    }

    #[inline]
    pub fn members(&self, holders: Holders) -> Members<'_> {
        match holders.0 & KIND {
            0 => Members::One(holders.0),
            TWO => Members::Two(holders.0 >> PAIR_BITS & (PAIR_SLOTS - 1), holders.0 & (PAIR_SLOTS - 1)),
            _ => match &self.sets[(holders.0 & !KIND) as usize].stored {
                Stored::List(slots) => Members::List(slots),
                Stored::Bits(words) => Members::Bits(words),
            },
        }
    }

    pub fn contains(&self, holders: Holders, slot: u32) -> bool {
        match self.members(holders) {
            Members::One(a) => a == slot,
            Members::Two(a, b) => a == slot || b == slot,
            Members::List(slots) => slots.binary_search(&(slot as u16)).is_ok(),
            Members::Bits(words) => {
                words.get(slot as usize / 64).is_some_and(|word| word >> (slot % 64) & 1 == 1)
            }
        }
    }

    /// The holders of one block after `slot` joined them. The block gives up its old code for the new one.
    pub fn add(&mut self, holders: Holders, slot: u32) -> Holders {
        if let Some((from, added, to)) = self.last_added {
            if from == holders && added == slot {
                return self.exchange(from, to);
            }
        }
        if self.contains(holders, slot) {
            return holders;
        }
        let mut slots = self.slots(holders);
        let position = slots.partition_point(|&other| u32::from(other) < slot);
        slots.insert(position, slot as u16);
        let to = self.intern(&slots);
        let to = self.exchange(holders, to);
        self.last_added = Some((holders, slot, to));
        self.forget_freed(holders);
        to
    }

    /// The holders of one block after `slot` left them, or None when nobody is left.
    pub fn remove(&mut self, holders: Holders, slot: u32) -> Option<Holders> {
        if holders.0 & KIND == 0 {
            return (holders.0 != slot).then_some(holders);
        }
        if let Some((from, removed, to)) = self.last_removed {
            if from == holders && removed == slot {
                return Some(self.exchange(from, to));
            }
        }
        if !self.contains(holders, slot) {
            return Some(holders);
        }
        let mut slots = self.slots(holders);
        slots.retain(|&other| u32::from(other) != slot);
        let to = self.intern(&slots);
        let to = self.exchange(holders, to);
        self.last_removed = Some((holders, slot, to));
        self.forget_freed(holders);
        Some(to)
    }

    /// All slots of a set, sorted.
    fn slots(&self, holders: Holders) -> Vec<u16> {
        match self.members(holders) {
            Members::One(a) => vec![a as u16],
            Members::Two(a, b) => vec![a as u16, b as u16],
            Members::List(slots) => slots.to_vec(),
            Members::Bits(words) => bits_of(words).map(|slot| slot as u16).collect(),
        }
    }

    /// The code of the sorted `slots`, not yet counted for any block.
    fn intern(&mut self, slots: &[u16]) -> Holders {
        match *slots {
            [a] => return Holders(u32::from(a)),
            [a, b] if u32::from(b) < PAIR_SLOTS => {
                return Holders(TWO | u32::from(a) << PAIR_BITS | u32::from(b));
            }
            _ => {}
        }
        let fingerprint = slots.iter().fold(0, |sum, &slot| sum ^ mixed(slot));
        let stored = Stored::of(slots);
        let same = |id: &u32| {
            let set = &self.sets[*id as usize];
            set.fingerprint == fingerprint && set.stored == stored
        };
        if let Some(&id) = self.by_fingerprint.find(fingerprint, same) {
            return Holders(MANY | id);
        }
        self.stored_bytes += stored.bytes();
        let set = Set { n_blocks: 0, fingerprint, stored };
        let id = if let Some(id) = self.free.pop() {
            self.sets[id as usize] = set;
            id
        } else {
            self.sets.push(set);
            self.sets.len() as u32 - 1
        };
        assert!(id & KIND == 0, "fewer than 2^30 distinct sets of holders");
        self.by_fingerprint.insert_unique(fingerprint, id, |&id| self.sets[id as usize].fingerprint);
        Holders(MANY | id)
    }

    /// Counts one block less for `from` and one more for `to`.
    #[inline]
    fn exchange(&mut self, from: Holders, to: Holders) -> Holders {
        if to.0 & KIND == MANY {
            self.sets[(to.0 & !KIND) as usize].n_blocks += 1;
        }
        self.release(from);
        to
    }

    /// Counts one block less for `holders`, as when the block is forgotten.
    #[inline]
    pub fn release(&mut self, holders: Holders) {
        if holders.0 & KIND != MANY {
            return;
        }
        let id = holders.0 & !KIND;
        let set = &mut self.sets[id as usize];
        set.n_blocks -= 1;
        if set.n_blocks == 0 {
            self.free_set(id);
            self.forget_freed(holders);
        }
    }

    fn free_set(&mut self, id: u32) {
        let set = &mut self.sets[id as usize];
        self.stored_bytes -= set.stored.bytes();
        set.stored = Stored::List(Box::default());
        let entry = self.by_fingerprint.find_entry(set.fingerprint, |&other| other == id);
        entry.expect("an interned set is listed").remove();
        self.free.push(id);
        if self.free.len() == self.sets.len() {
            *self = HolderSets::default();
        }
    }

    /// A remembered change must not name a set that no block has any more.
    fn forget_freed(&mut self, holders: Holders) {
        let freed = holders.0 & KIND == MANY
            && self.sets.get((holders.0 & !KIND) as usize).is_none_or(|set| set.n_blocks == 0);
        if freed {
            let names = |change: &Option<(Holders, u32, Holders)>| {
                change.is_some_and(|(from, _, to)| from == holders || to == holders)
            };
            if names(&self.last_added) {
                self.last_added = None;
            }
            if names(&self.last_removed) {
                self.last_removed = None;
            }
        }
    }
}

impl Stored {
    fn of(slots: &[u16]) -> Self {
        let n_words = slots.last().map_or(0, |&last| usize::from(last) / 64 + 1);
        if size_of_val(slots) <= n_words * size_of::<u64>() {
            return Stored::List(slots.into());
        }
        let mut words = vec![0u64; n_words].into_boxed_slice();
        for &slot in slots {
            words[usize::from(slot) / 64] |= 1 << (slot % 64);
        }
        Stored::Bits(words)
    }

    fn bytes(&self) -> usize {
        match self {
            Stored::List(slots) => size_of_val(&**slots),
            Stored::Bits(words) => size_of_val(&**words),
        }
    }
}

/// The slots whose bits are set, rising.
pub fn bits_of(words: &[u64]) -> impl Iterator<Item = u32> + '_ {
    words.iter().enumerate().flat_map(|(i, &word)| {
        let mut rest = word;
        std::iter::from_fn(move || {
            let bit = (rest != 0).then(|| rest.trailing_zeros())?;
            rest &= rest - 1;
            Some(i as u32 * 64 + bit)
        })
    })
}

fn mixed(slot: u16) -> u64 {
    let x = (u64::from(slot) + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    (x ^ (x >> 29)).wrapping_mul(0xBF58_476D_1CE4_E5B9)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn sets_are_interned_and_freed() {
        let mut sets = HolderSets::default();
        let mut blocks = [Holders::one(5); 3];
        let mut twin = BTreeSet::from([5u16]);
        for slot in [9, 0, 700, 3, 65_535, 64, 40_000, 8, 9] {
            for block in &mut blocks {
                *block = sets.add(*block, slot);
            }
            twin.insert(slot as u16);
            assert!(blocks.iter().all(|block| *block == blocks[0]));
            assert_eq!(sets.slots(blocks[0]), twin.iter().copied().collect::<Vec<_>>());
        }
        assert_eq!(sets.sets.iter().filter(|set| set.n_blocks > 0).count(), 1);
        for slot in twin {
            for block in &mut blocks {
                if let Some(left) = sets.remove(*block, u32::from(slot)) {
                    *block = left;
                    assert!(!sets.contains(left, u32::from(slot)));
                }
            }
        }
        assert_eq!(sets.bytes(), 0);
    }

    #[test]
    fn dense_sets_become_bitsets() {
        let mut sets = HolderSets::default();
        let mut block = Holders::one(0);
        for slot in 1..1000 {
            block = sets.add(block, slot);
        }
        assert!(matches!(sets.members(block), Members::Bits(words) if words.len() == 16));
        assert!(sets.slots(block).into_iter().eq(0..1000));
    }
}
