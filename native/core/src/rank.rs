//! What one rank holds in one medium: its engine's names for blocks, and how often each was stored.

use hashbrown::HashMap;

use crate::holders::{HolderSets, Holders};
use crate::pages::PagePool;
use crate::table::Table;

#[derive(Default)]
pub(crate) struct Rank {
    /// Engine key → sequence key.
    pub names: Table<u64>,
    /// Engine key → stores beyond the first.
    repeats: HashMap<u64, u32>,
    /// Sequence key → engine hashes beyond the first that name it.
    aliases: HashMap<u64, u32>,
}

/// What became of a store.
pub(crate) enum Placed {
    New,
    Repeated,
    /// The name stood for this sequence until now.
    Instead(u64),
    OverLimit,
}

/// What became of a removal.
pub(crate) enum TakenBack {
    Unknown,
    StillStored,
    /// The name is gone; it stood for this sequence.
    Last(u64),
}

impl Rank {
    /// Notes one more store of `sequence` under `name`. A name that stood for other content stands for the
    /// new one alone: its earlier stores are forgotten, because the engine cannot mean both.
    #[inline]
    pub fn place(&mut self, pages: &mut PagePool, name: u64, sequence: u64, max: usize) -> Placed {
        if self.names.len() >= max && self.names.get(name).is_none() {
            return Placed::OverLimit;
        }
        let mut placed = Placed::New;
        self.names.upsert(pages, name, |old| {
            match old {
                None => {}
                Some(old) if old == sequence => placed = Placed::Repeated,
                Some(old) => placed = Placed::Instead(old),
            }
            sequence
        });
        match placed {
            Placed::Repeated => *self.repeats.entry(name).or_insert(0) += 1,
            Placed::Instead(_) => forget(&mut self.repeats, name),
            _ => {}
        }
        placed
    }

    /// Takes back one store of `name`.
    #[inline]
    pub fn take_back(&mut self, pages: &mut PagePool, name: u64) -> TakenBack {
        if !self.repeats.is_empty() && count_down(&mut self.repeats, name) {
            return TakenBack::StillStored;
        }
        self.names.remove(pages, name).map_or(TakenBack::Unknown, TakenBack::Last)
    }

    /// Makes `slot` a holder of `sequence`, on behalf of one more name.
    #[inline]
    pub fn claim(
        &mut self,
        pages: &mut PagePool,
        blocks: &mut Table<Holders>,
        sets: &mut HolderSets,
        slot: u32,
        sequence: u64,
    ) {
        let mut is_alias = false;
        blocks.upsert(pages, sequence, |holders| match holders {
            None => Holders::one(slot),
            Some(holders) => {
                let joined = sets.add(holders, slot);
                is_alias = joined == holders;
                joined
            }
        });
        if is_alias {
            *self.aliases.entry(sequence).or_insert(0) += 1;
        }
    }

    /// Ends one name's claim to `sequence`; with the last one `slot` is no holder any more.
    #[inline]
    pub fn give_up(
        &mut self,
        pages: &mut PagePool,
        blocks: &mut Table<Holders>,
        sets: &mut HolderSets,
        slot: u32,
        sequence: u64,
    ) {
        if !self.aliases.is_empty() && count_down(&mut self.aliases, sequence) {
            return;
        }
        blocks.update(pages, sequence, |holders| sets.remove(holders, slot));
    }

    /// Forgets some names and all their stores; returns the names, and the sequences that they stood for.
    pub fn take_some(&mut self, pages: &mut PagePool) -> Vec<(u64, u64)> {
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
