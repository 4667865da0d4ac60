//! The longest contiguous prefix of a prompt that each slot holds, for all slots in one walk.

use crate::holders::{bits_of, HolderSets, Holders, Members};
use crate::table::Table;

/// Lookups in flight: enough to hide a memory access behind the others, few enough for a short prompt.
const AHEAD: usize = 32;

/// Spreads hashes over keys by secret bijections, so that nobody outside can aim at one place of a table.
#[derive(Clone, Copy)]
pub struct Mixer {
    factor: u64,
    inverse: u64,
}

impl Mixer {
    pub fn new(secret: u64) -> Self {
        let secret = (secret ^ (secret >> 30)).wrapping_add(0x9E37_79B9_7F4A_7C15);
        let factor = (secret ^ (secret >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB) | 1;
        // Newton's iteration: each step doubles the number of right bits, from 3.
        let inverse = (0..5).fold(factor, |inverse: u64, _| {
            inverse.wrapping_mul(2u64.wrapping_sub(factor.wrapping_mul(inverse)))
        });
        Mixer { factor, inverse }
    }

    /// The key of a hash, which may be anything: a counter, an address, a row of numbers that somebody made up.
    ///
    /// Hashes that differ in their leading bits alone are folded first: a single product would leave their keys an
    /// arithmetic progression, which some factors crowd into a few shards.
    #[inline]
    pub fn key(self, hash: u64) -> u64 {
        let half = folded(hash).wrapping_mul(self.factor);
        folded(half).wrapping_mul(self.factor)
    }

    /// The hash of a key.
    #[inline]
    pub fn hash(self, key: u64) -> u64 {
        let half = folded(key.wrapping_mul(self.inverse));
        folded(half.wrapping_mul(self.inverse))
    }
}

/// The upper half into the lower one; its own inverse.
#[inline]
fn folded(hash: u64) -> u64 {
    hash ^ (hash >> 32)
}

/// Fills `out[slot]` with how many leading blocks of `hashes` the slot holds, 0 for those that hold none.
///
/// Every slot in `blocks` has to be below `out.len()`.
pub fn overlap(blocks: &Table<Holders>, sets: &HolderSets, mixer: Mixer, hashes: &[u64], out: &mut [u32]) {
    let mut ahead = [blocks.prefetch(mixer.key(hashes.first().copied().unwrap_or(0))); AHEAD];
    for (probe, &hash) in ahead.iter_mut().zip(hashes).skip(1) {
        *probe = blocks.prefetch(mixer.key(hash));
    }
    let holders = hashes.iter().enumerate().map_while(|(depth, &hash)| {
        let probe = ahead[depth % AHEAD];
        if let Some(&next) = hashes.get(depth + AHEAD) {
            ahead[depth % AHEAD] = blocks.prefetch(mixer.key(next));
        }
        blocks.get_prefetched(probe, mixer.key(hash))
    });
    fill_depths(sets, holders, out);
}

/// Fills `out[slot]` with how many of a prompt's leading blocks the slot holds. `holders` are those of each block in
/// turn, up to the first that nobody holds.
#[inline]
pub fn fill_depths(sets: &HolderSets, holders: impl Iterator<Item = Holders>, out: &mut [u32]) {
    out.fill(0);
    let mut walk: Option<Walk> = None;
    let mut n_blocks = 0;
    for holders in holders {
        let walk = walk.get_or_insert_with(|| Walk::begin(sets, holders));
        if !walk.step(sets, holders, n_blocks, out) {
            return;
        }
        n_blocks += 1;
    }
    Walk::end(walk, n_blocks, out);
}

/// The slots that hold every block so far.
struct Walk {
    holders: Holders,
    remaining: Remaining,
}

enum Remaining {
    One(u32),
    Some { words: Vec<u64>, n_slots: u32 },
}

impl Walk {
    fn begin(sets: &HolderSets, holders: Holders) -> Self {
        let words = match sets.members(holders) {
            Members::One(slot) => return Walk { holders, remaining: Remaining::One(slot) },
            Members::Two(a, b) => with_bits([a, b]),
            Members::List(slots) => with_bits(slots.iter().map(|&slot| u32::from(slot))),
            Members::Bits(words) => words.to_vec(),
        };
        let n_slots = words.iter().map(|word| word.count_ones()).sum();
        Walk { holders, remaining: Remaining::Some { words, n_slots } }
    }

    /// Keeps the slots that hold the next block too; the others end with `depth` blocks. False when none is
    /// left.
    #[inline]
    fn step(&mut self, sets: &HolderSets, holders: Holders, depth: u32, out: &mut [u32]) -> bool {
        if holders == self.holders {
            return true;
        }
        self.holders = holders;
        match &mut self.remaining {
            Remaining::One(slot) => {
                let slot = *slot;
                let stays = sets.contains(holders, slot);
                if !stays {
                    out[slot as usize] = depth;
                }
                stays
            }
            Remaining::Some { words, n_slots } => {
                match sets.members(holders) {
                    Members::One(a) => keep_listed(words, n_slots, [a], depth, out),
                    Members::Two(a, b) => keep_listed(words, n_slots, [a, b], depth, out),
                    Members::List(slots) => {
                        keep_listed(words, n_slots, slots.iter().map(|&slot| u32::from(slot)), depth, out);
                    }
                    Members::Bits(held) => keep_bits(words, n_slots, held, depth, out),
                }
                if *n_slots == 0 {
                    return false;
                }
                let only = (*n_slots == 1).then(|| bits_of(words).next().expect("one bit"));
                if let Some(slot) = only {
                    self.remaining = Remaining::One(slot);
                }
                true
            }
        }
    }

    /// The slots that are left hold all `depth` blocks.
    fn end(walk: Option<Self>, depth: u32, out: &mut [u32]) {
        match walk.map(|walk| walk.remaining) {
            None => {}
            Some(Remaining::One(slot)) => out[slot as usize] = depth,
            Some(Remaining::Some { words, .. }) => {
                for slot in bits_of(&words) {
                    out[slot as usize] = depth;
                }
            }
        }
    }
}

fn with_bits(slots: impl IntoIterator<Item = u32>) -> Vec<u64> {
    let mut words = Vec::new();
    for slot in slots {
        let word = slot as usize / 64;
        if word >= words.len() {
            words.resize(word + 1, 0);
        }
        words[word] |= 1 << (slot % 64);
    }
    words
}

fn keep_bits(words: &mut [u64], n_slots: &mut u32, held: &[u64], depth: u32, out: &mut [u32]) {
    for (i, word) in words.iter_mut().enumerate() {
        let kept = *word & held.get(i).copied().unwrap_or(0);
        let mut lost = *word ^ kept;
        while lost != 0 {
            out[i * 64 + lost.trailing_zeros() as usize] = depth;
            lost &= lost - 1;
            *n_slots -= 1;
        }
        *word = kept;
    }
}

fn keep_listed(
    words: &mut [u64],
    n_slots: &mut u32,
    listed: impl IntoIterator<Item = u32> + Clone,
    depth: u32,
    out: &mut [u32],
) {
    let is_set = |words: &[u64], slot: u32| {
        words.get(slot as usize / 64).is_some_and(|word| word >> (slot % 64) & 1 == 1)
    };
    let n_kept = listed.clone().into_iter().filter(|&slot| is_set(words, slot)).count() as u32;
    if n_kept == *n_slots {
        return;
    }
    let mut held = vec![0u64; words.len()];
    for slot in listed.into_iter().filter(|&slot| is_set(words, slot)) {
        held[slot as usize / 64] |= 1 << (slot % 64);
    }
    keep_bits(words, n_slots, &held, depth, out);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Entries of the fullest of 1,024 equal ranges of keys, for 64 entries a range: names are `step` apart.
    fn fullest(mixer: Mixer, step: u64) -> usize {
        let mut ranges = [0; 1024];
        for name in 0..65_536_u64 {
            ranges[(mixer.key(name.wrapping_mul(step)) >> 54) as usize] += 1;
        }
        *ranges.iter().max().expect("there are ranges")
    }

    #[test]
    fn names_in_even_steps_are_spread_under_any_secret() {
        for secret in 0..400_u64 {
            let mixer = Mixer::new(secret.wrapping_mul(0xA076_1D64_78BD_642F));
            for step in [1, 3, 4096, 1 << 20, 1 << 32, 1 << 40, 1 << 47, 1 << 48] {
                assert!(fullest(mixer, step) < 192, "secret {secret}, step {step}");
            }
        }
    }

    #[test]
    fn mixing_is_a_bijection() {
        for secret in [0, 1, 0x1234_5678_9abc_def0, u64::MAX] {
            let mixer = Mixer::new(secret);
            for hash in [0, 1, u64::MAX, 1 << 63, 0xdead_beef] {
                assert_eq!(mixer.hash(mixer.key(hash)), hash);
            }
        }
    }
}
