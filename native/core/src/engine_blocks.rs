//! The blocks of one rank by its engine's own names for them, in each medium. Stores are counted: an engine may store a
//! block three times, and remove it three times.

use std::sync::Arc;

use hashbrown::HashMap;

use crate::hashing::{block_hashes, chain, hash_seed};
use crate::index::MEDIA;

/// A block in one medium. The salt applies to the blocks after it, too.
struct Held {
    parent: Option<u64>,
    block_hash: u64,
    sequence_hash: u64,
    cache_salt: Option<Arc<str>>,
    stores: u64,
}

pub struct EngineBlocks {
    media: [HashMap<u64, Held>; MEDIA],
    blocks_max: usize,
}

/// A store of consecutive blocks, `block_size` of the tokens in each of `names`.
pub struct Store<'a> {
    pub names: &'a [u64],
    pub parent: Option<u64>,
    pub tokens: &'a [u32],
    pub block_size: usize,
    pub medium: usize,
    pub lora_name: &'a str,
    /// None: that of the parent.
    pub cache_salt: Option<&'a str>,
    pub mm_hashes: &'a [Vec<u64>],
}

/// What was stored: as many of the names as there was room for.
pub struct Stored {
    pub parent: Option<u64>,
    pub block_hashes: Vec<u64>,
}

impl EngineBlocks {
    /// At most `blocks_max` blocks over all media.
    pub fn new(blocks_max: usize) -> Self {
        EngineBlocks { media: Default::default(), blocks_max }
    }

    pub fn held(&self, medium: usize) -> usize {
        self.media[medium].len()
    }

    pub fn is_held(&self, name: u64, medium: usize) -> bool {
        self.media[medium].contains_key(&name)
    }

    pub fn is_known(&self, name: u64) -> bool {
        self.media.iter().any(|held| held.contains_key(&name))
    }

    /// Stores blocks; None when their parent is unknown.
    pub fn store(&mut self, store: &Store) -> Option<Stored> {
        let (mut before, mut salt) = (None, None);
        if let Some(parent) = store.parent {
            let parent = self.find(parent, store.medium)?;
            before = Some(parent.sequence_hash);
            salt = parent.cache_salt.clone();
        }
        if let Some(own) = store.cache_salt {
            salt = Some(own.into());
        }
        let seed = hash_seed(store.lora_name, salt.as_deref().unwrap_or_default());
        let hashes = block_hashes(store.tokens, store.block_size, seed, store.mm_hashes);
        Some(self.place(store.names, hashes, store.parent, before, store.medium, salt))
    }

    /// Stores in `medium` a block that is known there or elsewhere; None when it is not, or its parent is not.
    pub fn copy(&mut self, name: u64, medium: usize) -> Option<Stored> {
        let held = self.find(name, medium)?;
        let before = match held.parent {
            Some(parent) => Some(self.find(parent, medium)?.sequence_hash),
            None => None,
        };
        let (parent, hashes, salt) = (held.parent, vec![held.block_hash], held.cache_salt.clone());
        Some(self.place(&[name], hashes, parent, before, medium, salt))
    }

    /// Takes back one store of each of `names`, in `medium` or else in the first one that holds it. Returns those that
    /// were held, by medium in the order of their first block.
    pub fn remove(&mut self, names: &[u64], medium: Option<usize>) -> Vec<(usize, Vec<u64>)> {
        let mut removed: Vec<(usize, Vec<u64>)> = Vec::new();
        for &name in names {
            let Some(medium) = medium.or_else(|| (0..MEDIA).find(|&each| self.is_held(name, each))) else {
                continue;
            };
            if !self.take_back(name, medium) {
                continue;
            }
            match removed.iter_mut().find(|(each, _)| *each == medium) {
                Some((_, names)) => names.push(name),
                None => removed.push((medium, vec![name])),
            }
        }
        removed
    }

    pub fn clear(&mut self) {
        self.media = Default::default();
    }

    /// The block in this medium, or else in the first one that holds it.
    fn find(&self, name: u64, medium: usize) -> Option<&Held> {
        self.media[medium].get(&name).or_else(|| self.media.iter().find_map(|held| held.get(&name)))
    }

    fn place(
        &mut self,
        names: &[u64],
        mut block_hashes: Vec<u64>,
        parent: Option<u64>,
        mut before: Option<u64>,
        medium: usize,
        salt: Option<Arc<str>>,
    ) -> Stored {
        // What is held already needs no room, but to find that out would cost as much as to place it.
        let room = self.blocks_max.saturating_sub(self.media.iter().map(HashMap::len).sum());
        block_hashes.truncate(room);
        let mut behind = parent;
        for (&name, &block_hash) in names.iter().zip(&block_hashes) {
            let sequence_hash = chain(before, block_hash);
            match self.media[medium].get_mut(&name) {
                Some(held) if held.sequence_hash == sequence_hash => held.stores += 1,
                _ => {
                    let cache_salt = salt.clone();
                    let held = Held { parent: behind, block_hash, sequence_hash, cache_salt, stores: 1 };
                    self.media[medium].insert(name, held);
                }
            }
            (before, behind) = (Some(sequence_hash), Some(name));
        }
        Stored { parent, block_hashes }
    }

    /// Whether there was a store to take back.
    fn take_back(&mut self, name: u64, medium: usize) -> bool {
        let Some(held) = self.media[medium].get_mut(&name) else { return false };
        held.stores -= 1;
        if held.stores == 0 {
            self.media[medium].remove(&name);
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn store<'a>(names: &'a [u64], parent: Option<u64>, tokens: &'a [u32]) -> Store<'a> {
        Store {
            names,
            parent,
            tokens,
            block_size: 2,
            medium: 0,
            lora_name: "",
            cache_salt: None,
            mm_hashes: &[],
        }
    }

    #[test]
    fn a_salt_applies_to_the_blocks_behind() {
        let mut blocks = EngineBlocks::new(9);
        let salted = Store { cache_salt: Some("a"), ..store(&[1], None, &[1, 2]) };
        blocks.store(&salted).unwrap();
        let behind = blocks.store(&store(&[2], Some(1), &[3, 4])).unwrap();
        assert_eq!(behind.block_hashes, block_hashes(&[3, 4], 2, hash_seed("", "a"), &[]));
        assert!(blocks.store(&store(&[3], Some(7), &[3, 4])).is_none());
    }

    #[test]
    fn a_copy_has_the_hash_and_the_parent_of_its_block() {
        let mut blocks = EngineBlocks::new(9);
        let stored = blocks.store(&store(&[1, 2], None, &[1, 2, 3, 4])).unwrap();
        let copied = blocks.copy(2, 1).unwrap();
        assert_eq!((copied.parent, &copied.block_hashes[..]), (Some(1), &stored.block_hashes[1..]));
        blocks.remove(&[1], None);
        assert!(blocks.copy(2, 1).is_none());
    }

    #[test]
    fn a_block_of_another_content_begins_with_one_store() {
        let mut blocks = EngineBlocks::new(9);
        for tokens in [[1, 2], [1, 2], [3, 4]] {
            blocks.store(&store(&[1], None, &tokens));
        }
        assert_eq!(blocks.remove(&[1, 1], None), [(0, vec![1])]);
    }

    #[test]
    fn what_has_no_room_is_left_out() {
        let mut blocks = EngineBlocks::new(1);
        assert_eq!(blocks.store(&store(&[1, 2], None, &[1, 2, 3, 4])).unwrap().block_hashes.len(), 1);
        assert_eq!(blocks.store(&store(&[3], None, &[5, 6])).unwrap().block_hashes.len(), 0);
    }
}
