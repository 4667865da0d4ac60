//! What one rank of the engine holds: enough to send all of it to a worker again.

use std::sync::Arc;

use hashbrown::HashMap;
use kvrouter_core::hashing::chain;

pub const MEDIA: usize = 4;

/// Tables of one medium. A call of the engine's grows or copies one of them, never all.
const TABLES: usize = 256;

#[derive(Clone, Copy)]
struct Block {
    block_hash: u64,
    sequence_hash: u64,
    parent: Option<u64>,
    stores: u32,
}

/// Blocks of each medium by engine hash. Clones share the tables; a table is copied before its first change.
#[derive(Clone, Default)]
pub struct Mirror {
    media: [Held; MEDIA],
}

#[derive(Clone, Default)]
struct Held {
    /// None until the first store, then [`TABLES`] of them.
    tables: Vec<Arc<HashMap<u64, Block>>>,
    blocks: usize,
}

impl Held {
    fn get(&self, name: u64) -> Option<&Block> {
        self.tables.get(table_of(name))?.get(&name)
    }

    fn put(&mut self, name: u64, block: Block) {
        if self.tables.is_empty() {
            self.tables.resize_with(TABLES, Arc::default);
        }
        let before = Arc::make_mut(&mut self.tables[table_of(name)]).insert(name, block);
        self.blocks += usize::from(before.is_none());
    }

    fn remove(&mut self, name: u64) {
        if let Some(table) = self.tables.get_mut(table_of(name)) {
            self.blocks -= usize::from(Arc::make_mut(table).remove(&name).is_some());
        }
    }

    fn iter(&self) -> impl Iterator<Item = (u64, &Block)> {
        self.tables.iter().flat_map(|table| table.iter().map(|(&name, block)| (name, block)))
    }
}

/// Spreads at random, not evenly: tables that fill at the same pace would all grow in the same call.
fn table_of(name: u64) -> usize {
    let mixed = (name ^ (name >> 32)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mixed = (mixed ^ (mixed >> 29)).wrapping_mul(0x94d0_49bb_1331_11eb);
    (mixed >> 32) as usize % TABLES
}

/// Consecutive blocks of one store.
#[derive(Debug, PartialEq, Eq)]
pub struct Run {
    pub medium: usize,
    pub parent: Option<u64>,
    pub engine_hashes: Vec<u64>,
    pub block_hashes: Vec<u64>,
}

impl Mirror {
    /// How many blocks are held, one for each engine hash of each medium.
    pub fn blocks(&self) -> usize {
        self.media.iter().map(|held| held.blocks).sum()
    }

    /// Notes consecutive blocks. False, and nothing is noted, when the parent is not held in any medium.
    ///
    /// A name that stood for other content stands for the new one alone, as in the routers' index.
    pub fn store(&mut self, medium: usize, parent: Option<u64>, engine: &[u64], blocks: &[u64]) -> bool {
        let mut sequence = None;
        if let Some(name) = parent {
            sequence = self.sequence_of(medium, name);
            if sequence.is_none() {
                return false;
            }
        }
        let held = &mut self.media[medium];
        let mut parent = parent;
        for (&name, &block_hash) in engine.iter().zip(blocks) {
            let sequence_hash = chain(sequence, block_hash);
            let before = held.get(name).filter(|old| old.sequence_hash == sequence_hash);
            let stores = before.map_or(0, |old| old.stores).saturating_add(1);
            held.put(name, Block { block_hash, sequence_hash, parent, stores });
            (sequence, parent) = (Some(sequence_hash), Some(name));
        }
        true
    }

    /// Takes back one store of each name; returns how many names were not held.
    pub fn remove(&mut self, medium: usize, engine: &[u64]) -> u64 {
        let held = &mut self.media[medium];
        let mut unknown = 0;
        for &name in engine {
            match held.get(name) {
                None => unknown += 1,
                Some(&block) if block.stores > 1 => {
                    held.put(name, Block { stores: block.stores - 1, ..block });
                }
                Some(_) => held.remove(name),
            }
        }
        unknown
    }

    pub fn clear(&mut self) {
        self.media = Default::default();
    }

    /// Gives every held block to `publish`, parents first, in stores of at most `blocks_max` blocks.
    ///
    /// A block whose parent is gone begins a store of its own under its sequence hash, which chains like a
    /// first block's own hash. A block that was stored `n` times is given `n` times. Ends at the first error.
    pub fn replay<E>(
        &self,
        blocks_max: usize,
        mut publish: impl FnMut(Run) -> Result<(), E>,
    ) -> Result<(), E> {
        for (medium, held) in self.media.iter().enumerate() {
            tell_medium(medium, held, blocks_max, &mut publish)?;
        }
        Ok(())
    }

    /// The sequence hash that the rank calls `name`: in this medium, or in any other.
    fn sequence_of(&self, medium: usize, name: u64) -> Option<u64> {
        let in_medium = |medium: usize| Some(self.media[medium].get(name)?.sequence_hash);
        in_medium(medium).or_else(|| (0..MEDIA).find_map(in_medium))
    }
}

fn tell_medium<E>(
    medium: usize,
    held: &Held,
    blocks_max: usize,
    tell: &mut impl FnMut(Run) -> Result<(), E>,
) -> Result<(), E> {
    let mut children: HashMap<u64, Vec<(u64, &Block)>> = HashMap::new();
    let mut starts = Vec::new();
    for (name, block) in held.iter() {
        match block.parent.filter(|parent| follows(held, *parent, block)) {
            Some(parent) => children.entry(parent).or_default().push((name, block)),
            None => starts.push((None, name, block)),
        }
    }
    while let Some((parent, first, block)) = starts.pop() {
        let mut run = begin(medium, parent, first, block);
        let mut last = first;
        while let Some(mut next) = children.remove(&last) {
            let Some((name, block)) = next.pop() else { break };
            starts.extend(next.into_iter().map(|(other, block)| (Some(last), other, block)));
            if run.engine_hashes.len() == blocks_max {
                tell(std::mem::replace(&mut run, begin(medium, Some(last), name, block)))?;
            } else {
                run.engine_hashes.push(name);
                run.block_hashes.push(block.block_hash);
            }
            last = name;
        }
        tell(run)?;
    }
    for (name, block) in held.iter() {
        for _ in 1..block.stores {
            tell(begin(medium, None, name, block))?;
        }
    }
    Ok(())
}

/// A store that begins with `name`: after `parent`, or, without one, under the block's sequence hash.
fn begin(medium: usize, parent: Option<u64>, name: u64, block: &Block) -> Run {
    let hash = if parent.is_some() { block.block_hash } else { block.sequence_hash };
    Run { medium, parent, engine_hashes: vec![name], block_hashes: vec![hash] }
}

/// Whether the engine's name for the parent still stands for what the block was stored after.
fn follows(held: &Held, parent: u64, block: &Block) -> bool {
    held.get(parent)
        .is_some_and(|parent| chain(Some(parent.sequence_hash), block.block_hash) == block.sequence_hash)
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvrouter_core::hashing::sequence_hashes;
    use std::collections::BTreeMap;

    /// (medium, engine hash) → (sequence hash, stores), seen from outside.
    fn content(mirror: &Mirror) -> BTreeMap<(usize, u64), (u64, u32)> {
        let rows = mirror.media.iter().enumerate();
        rows.flat_map(|(medium, held)| {
            held.iter().map(move |(name, block)| ((medium, name), (block.sequence_hash, block.stores)))
        })
        .collect()
    }

    fn replayed(mirror: &Mirror, blocks_max: usize) -> Mirror {
        let mut other = Mirror::default();
        let result: Result<(), ()> = mirror.replay(blocks_max, |run| {
            assert!(run.engine_hashes.len() <= blocks_max);
            assert!(other.store(run.medium, run.parent, &run.engine_hashes, &run.block_hashes));
            Ok(())
        });
        result.unwrap();
        other
    }

    #[test]
    fn a_parent_that_is_not_held_is_refused() {
        let mut mirror = Mirror::default();
        assert!(!mirror.store(0, Some(9), &[1], &[11]));
        assert_eq!(mirror.blocks(), 0);
    }

    #[test]
    fn a_chain_is_one_store() {
        let mut mirror = Mirror::default();
        assert!(mirror.store(0, None, &[1, 2], &[11, 12]));
        assert!(mirror.store(0, Some(2), &[3], &[13]));
        let mut runs = Vec::new();
        let result: Result<(), ()> = mirror.replay(64, |run| {
            runs.push(run);
            Ok(())
        });
        result.unwrap();
        let whole =
            Run { medium: 0, parent: None, engine_hashes: vec![1, 2, 3], block_hashes: vec![11, 12, 13] };
        assert_eq!(runs, [whole]);
    }

    #[test]
    fn a_block_that_lost_its_parent_keeps_its_sequence() {
        let mut mirror = Mirror::default();
        mirror.store(0, None, &[1, 2, 3], &[11, 12, 13]);
        assert_eq!(mirror.remove(0, &[2, 7]), 1);
        let sequences = sequence_hashes(&[11, 12, 13]);
        let again = content(&replayed(&mirror, 64));
        assert_eq!(again, BTreeMap::from([((0, 1), (sequences[0], 1)), ((0, 3), (sequences[2], 1))]));
    }

    #[test]
    fn a_name_that_stands_for_other_content_forgets_its_stores() {
        let mut mirror = Mirror::default();
        mirror.store(0, None, &[1], &[11]);
        mirror.store(0, None, &[1], &[11]);
        mirror.store(0, None, &[1], &[99]);
        assert_eq!(content(&mirror), BTreeMap::from([((0, 1), (99, 1))]));
        assert_eq!(mirror.remove(0, &[1]), 0);
        assert_eq!(mirror.blocks(), 0);
    }

    /// Whatever happened before, a replay from nothing gives what is held.
    #[test]
    fn what_is_replayed_is_what_is_held() {
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        let mut draw = |below: u64| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state % below
        };
        for _ in 0..200 {
            let mut mirror = Mirror::default();
            for _ in 0..60 {
                let medium = draw(2) as usize;
                let names: Vec<u64> = (0..=draw(4)).map(|_| draw(24)).collect();
                let hashes: Vec<u64> = names.iter().map(|_| 100 + draw(6)).collect();
                match draw(8) {
                    0..=3 => drop(mirror.store(medium, Some(draw(24)), &names, &hashes)),
                    4 | 5 => drop(mirror.store(medium, None, &names, &hashes)),
                    _ => drop(mirror.remove(medium, &names)),
                }
                assert_eq!(content(&replayed(&mirror, 3)), content(&mirror));
            }
        }
    }
}
