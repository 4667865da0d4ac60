//! What one rank holds in one medium: its engine's names for blocks, and how often each was stored.

use hashbrown::HashMap;

use crate::blocks::{Blocks, Code};
use crate::holders::HolderSets;
use crate::pages::PagePool;
use crate::table::{Found, Table};

#[derive(Default)]
pub(crate) struct Rank {
    /// Engine key → the block that it stands for.
    pub names: Table<Code>,
    /// Engine key → stores beyond the first.
    repeats: HashMap<u64, u32>,
    /// Sequence key → engine hashes beyond the first that name it.
    aliases: HashMap<u64, u32>,
}

/// What became of a store.
pub(crate) enum Placed {
    New,
    Repeated,
    /// The name stood for other content until now.
    Instead,
    OverLimit,
}

/// What became of a removal.
pub(crate) enum TakenBack {
    Unknown,
    StillStored,
    /// The name is gone; it stood for this block.
    Last(Code),
}

/// Where the blocks of a rank's medium are.
pub(crate) struct Held<'a> {
    pub pages: &'a mut PagePool,
    pub blocks: &'a mut Blocks,
    pub sets: &'a mut HolderSets,
    pub slot: u32,
}

impl Rank {
    /// Notes one more store of `sequence` under `name`. A name that stood for other content stands for the
    /// new one alone: its earlier stores are forgotten, because the engine cannot mean both.
    #[inline]
    pub fn store(&mut self, held: &mut Held<'_>, name: u64, sequence: u64, max: usize) -> Placed {
        match self.names.find(name) {
            Found::Vacant { .. } if self.names.len() >= max => Placed::OverLimit,
            Found::Vacant { place, .. } => {
                let code = self.claim(held, sequence);
                self.names.insert(held.pages, place, name, code);
                Placed::New
            }
            Found::At(place) => {
                let old = self.names.value(place, name);
                if held.blocks.find(old).sequence == sequence {
                    *self.repeats.entry(name).or_insert(0) += 1;
                    return Placed::Repeated;
                }
                forget(&mut self.repeats, name);
                self.give_up(held, old);
                let code = self.claim(held, sequence);
                self.names.set_value(place, name, code);
                Placed::Instead
            }
        }
    }

    /// Takes back one store of `name`.
    #[inline]
    pub fn take_back(&mut self, pages: &mut PagePool, name: u64) -> TakenBack {
        if !self.repeats.is_empty() && count_down(&mut self.repeats, name) {
            return TakenBack::StillStored;
        }
        self.names.remove(pages, name).map_or(TakenBack::Unknown, TakenBack::Last)
    }

    /// Makes the slot a holder of `sequence`, on behalf of one more name.
    #[inline]
    fn claim(&mut self, held: &mut Held<'_>, sequence: u64) -> Code {
        let (code, is_alias) = held.blocks.add_holder(held.pages, held.sets, held.slot, sequence);
        if is_alias {
            *self.aliases.entry(sequence).or_insert(0) += 1;
        }
        code
    }

    /// Ends one name's claim to a block; with the last one the slot is no holder any more.
    #[inline]
    pub fn give_up(&mut self, held: &mut Held<'_>, code: Code) {
        let block = held.blocks.find(code);
        if !self.aliases.is_empty() && count_down(&mut self.aliases, block.sequence) {
            return;
        }
        held.blocks.remove_holder(held.pages, held.sets, held.slot, block);
    }

    /// Forgets some names and all their stores; returns the names, and the blocks that they stood for.
    pub fn take_some(&mut self, pages: &mut PagePool) -> Vec<(u64, Code)> {
        let taken = self.names.take_some(pages);
        for &(name, _) in &taken {
            forget(&mut self.repeats, name);
        }
        taken
    }

    /// How often a name that the rank holds was stored.
    pub fn n_stores(&self, name: u64) -> usize {
        1 + self.repeats.get(&name).map_or(0, |&n| n as usize)
    }

    pub fn bytes(&self) -> usize {
        let entry_bytes = size_of::<u64>() + size_of::<u32>() + 5;
        size_of::<Rank>()
            + self.names.own_bytes()
            + (self.repeats.capacity() + self.aliases.capacity()) * entry_bytes
    }
}

/// Takes one off the count of `key`; false when it has none.
fn count_down(counts: &mut HashMap<u64, u32>, key: u64) -> bool {
    match counts.get_mut(&key) {
        None => false,
        Some(1) => {
            forget(counts, key);
            true
        }
        Some(count) => {
            *count -= 1;
            true
        }
    }
}

fn forget(counts: &mut HashMap<u64, u32>, key: u64) {
    counts.remove(&key);
    if counts.capacity() > 64 && counts.len() * 4 < counts.capacity() {
        counts.shrink_to(counts.len() * 2);
    }
}
