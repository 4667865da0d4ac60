//! Which slots hold which blocks, where every engine names a block by its content and no event is lost: the index of a
//! simulation.
//!
//! It knows no rank's own names, so that a block costs one lookup, and it may double at once, because nobody waits for
//! an answer meanwhile.

use hashbrown::hash_table::{Entry, HashTable};

use crate::events::Event;
use crate::hashing::chain;
use crate::holders::{HolderSets, Holders};
use crate::overlap::fill_depths;
use crate::paged_kv::{content_name, sequence_of};

#[derive(Default)]
pub struct ContentIndex {
    /// Blocks by their names, which are as good as random.
    blocks: HashTable<(u64, Holders)>,
    sets: HolderSets,
    /// The slots that stored a block since they were dropped, the last of them at the end.
    is_used: Vec<bool>,
}

/// The first block of an event does not have the name that its content gives it.
#[derive(Debug, PartialEq, Eq)]
pub struct OtherName(pub u64);

impl ContentIndex {
    /// Applies one event of the rank at `slot`.
    pub fn apply(&mut self, slot: u32, event: &Event<'_>) -> Result<(), OtherName> {
        let (names, first_sequence) = match *event {
            Event::Stored { parent, engine_hashes, block_hashes, .. } => {
                (engine_hashes, block_hashes.first().map(|&block| chain(parent.map(sequence_of), block)))
            }
            Event::Held { engine_hashes, sequence_hashes, .. } => {
                (engine_hashes, sequence_hashes.first().copied())
            }
            Event::Removed { engine_hashes, .. } => {
                self.remove(slot, engine_hashes);
                return Ok(());
            }
            Event::Cleared => {
                self.drop_rank(slot);
                return Ok(());
            }
        };
        if first_sequence.is_some_and(|sequence| content_name(sequence) != names[0]) {
            return Err(OtherName(names[0]));
        }
        self.store(slot, names);
        Ok(())
    }

    fn store(&mut self, slot: u32, names: &[u64]) {
        if self.is_used.len() <= slot as usize {
            self.is_used.resize(slot as usize + 1, false);
        }
        self.is_used[slot as usize] = true;
        for &name in names {
            match self.blocks.entry(name, |&(other, _)| other == name, |&(other, _)| other) {
                Entry::Vacant(entry) => drop(entry.insert((name, Holders::one(slot)))),
                Entry::Occupied(mut entry) => {
                    let holders = &mut entry.get_mut().1;
                    *holders = self.sets.add(*holders, slot);
                }
            }
        }
    }

    fn remove(&mut self, slot: u32, names: &[u64]) {
        for &name in names {
            if let Ok(mut entry) = self.blocks.find_entry(name, |&(other, _)| other == name) {
                match self.sets.remove(entry.get().1, slot) {
                    Some(left) => entry.get_mut().1 = left,
                    None => drop(entry.remove()),
                }
            }
        }
    }

    /// Removes everything that the rank at `slot` holds.
    pub fn drop_rank(&mut self, slot: u32) {
        let Some(is_used) = self.is_used.get_mut(slot as usize) else { return };
        if !std::mem::take(is_used) {
            return;
        }
        let n_slots = self.is_used.iter().rposition(|&is_used| is_used).map_or(0, |last| last + 1);
        self.is_used.truncate(n_slots);
        let sets = &mut self.sets;
        self.blocks.retain(|(_, holders)| sets.remove(*holders, slot).map(|left| *holders = left).is_some());
    }

    /// Fills `out` with how many leading blocks each slot holds; false, filling nothing, when it is too short.
    #[must_use]
    pub fn overlap(&self, sequence_hashes: &[u64], out: &mut [u32]) -> bool {
        let fits = self.is_used.len() <= out.len();
        if fits {
            let holders = sequence_hashes.iter().map_while(|&sequence| {
                let name = content_name(sequence);
                self.blocks.find(name, |&(other, _)| other == name).map(|&(_, holders)| holders)
            });
            fill_depths(&self.sets, holders, out);
        }
        fits
    }
}
