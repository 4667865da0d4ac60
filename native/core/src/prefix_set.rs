//! Which blocks were ever seen: what an endless cache shared by all would hold.

use hashbrown::HashTable;

/// Blocks by their sequence hashes, which are as good as random. With more than `blocks_max` it is given up.
pub struct PrefixSet {
    seen: HashTable<u64>,
    blocks_max: usize,
    is_given_up: bool,
}

impl PrefixSet {
    pub fn new(blocks_max: usize) -> Self {
        PrefixSet { seen: HashTable::new(), blocks_max, is_given_up: false }
    }

    /// How many leading blocks were seen before; from now on, all of them were. None once there were too many.
    pub fn add(&mut self, sequence_hashes: &[u64]) -> Option<usize> {
        if self.is_given_up {
            return None;
        }
        let held = sequence_hashes
            .iter()
            .take_while(|&&hash| self.seen.find(hash, |&other| other == hash).is_some())
            .count();
        for &hash in &sequence_hashes[held..] {
            self.seen.entry(hash, |&other| other == hash, |&other| other).or_insert(hash);
        }
        if self.seen.len() > self.blocks_max {
            self.is_given_up = true;
            self.seen = HashTable::new();
            return None;
        }
        Some(held)
    }
}
