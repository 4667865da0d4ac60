//! Block hashes and sequence hashes.
//!
//! A block hash is XXH3-64 over the block's token ids (u32, little-endian) and, sorted, the hashes of the
//! multimodal objects in it, under a seed that carries the LoRA and the cache namespace. A sequence hash
//! chains block hashes: `s0 = h0`, `si = XXH3-64(s(i-1) ‖ hi)` under [`SEED`].

use xxhash_rust::const_xxh3::const_custom_default_secret;
use xxhash_rust::xxh3::{xxh3_64_with_secret, xxh3_64_with_seed};

/// The seed of sequence hashes, and of block hashes without LoRA or namespace.
pub const SEED: u64 = 1337;

/// Inputs longer than this take XXH3's long path, where the seed only acts through a derived secret.
const SHORT_BYTES: usize = 240;

const LORA_SEED: u64 = 0;
const NAMESPACE_SEED: u64 = 1;

/// The seed of block hashes under a LoRA adapter and a cache namespace; empty names count as absent.
pub fn hash_seed(lora_name: &str, cache_namespace: &str) -> u64 {
    let mut seed = SEED;
    if !lora_name.is_empty() {
        seed = seed.wrapping_add(xxh3_64_with_seed(lora_name.as_bytes(), LORA_SEED));
    }
    if !cache_namespace.is_empty() {
        seed = seed.wrapping_add(xxh3_64_with_seed(cache_namespace.as_bytes(), NAMESPACE_SEED));
    }
    seed
}

/// The hash of every full block of `tokens`; `mm_hashes[i]`, where present, salts block `i`.
///
/// # Panics
/// When `block_size` is 0.
pub fn block_hashes(tokens: &[u32], block_size: usize, seed: u64, mm_hashes: &[Vec<u64>]) -> Vec<u64> {
    assert!(block_size > 0, "a block has at least one token");
    let mut hasher = BlockHasher::new(seed);
    let mut hashes = Vec::with_capacity(tokens.len() / block_size);
    for (i, block) in tokens.chunks_exact(block_size).enumerate() {
        let salts = mm_hashes.get(i).map_or(&[][..], Vec::as_slice);
        hashes.push(hasher.hash(block, salts));
    }
    hashes
}

/// Chains `block_hashes` into sequence hashes.
pub fn sequence_hashes(block_hashes: &[u64]) -> Vec<u64> {
    let mut hashes = Vec::with_capacity(block_hashes.len());
    let mut previous = None;
    for &block in block_hashes {
        let next = chain(previous, block);
        hashes.push(next);
        previous = Some(next);
    }
    hashes
}

/// The sequence hash of a block that follows `parent`, or begins a sequence.
#[inline]
pub fn chain(parent: Option<u64>, block: u64) -> u64 {
    match parent {
        None => block,
        Some(parent) => {
            let mut bytes = [0u8; 16];
            bytes[..8].copy_from_slice(&parent.to_le_bytes());
            bytes[8..].copy_from_slice(&block.to_le_bytes());
            xxh3_64_with_seed(&bytes, SEED)
        }
    }
}

struct BlockHasher {
    seed: u64,
    secret: [u8; 192],
    scratch: Vec<u8>,
}

impl BlockHasher {
    fn new(seed: u64) -> Self {
        BlockHasher { seed, secret: const_custom_default_secret(seed), scratch: Vec::new() }
    }

    #[inline]
    fn hash(&mut self, block: &[u32], salts: &[u64]) -> u64 {
        if salts.is_empty() && cfg!(target_endian = "little") {
            return self.hash_bytes(as_le_bytes(block));
        }
        let mut sorted = salts.to_vec();
        sorted.sort_unstable();
        let mut bytes = std::mem::take(&mut self.scratch);
        bytes.clear();
        bytes.extend(block.iter().flat_map(|token| token.to_le_bytes()));
        bytes.extend(sorted.iter().flat_map(|salt| salt.to_le_bytes()));
        let hash = self.hash_bytes(&bytes);
        self.scratch = bytes;
        hash
    }

    /// Equal to XXH3-64 with the seed; the secret of long inputs is derived once, not for every block.
    #[inline]
    fn hash_bytes(&self, bytes: &[u8]) -> u64 {
        if bytes.len() > SHORT_BYTES {
            xxh3_64_with_secret(bytes, &self.secret)
        } else {
            xxh3_64_with_seed(bytes, self.seed)
        }
    }
}

/// The memory of `tokens` as bytes; meaningful as little-endian ids on little-endian machines.
fn as_le_bytes(tokens: &[u32]) -> &[u8] {
    // SAFETY: u32 has no padding and u8 no alignment; the length in bytes is that of the same allocation.
    unsafe { std::slice::from_raw_parts(tokens.as_ptr().cast::<u8>(), std::mem::size_of_val(tokens)) }
}

/// splitmix64's output for 64 bits: each input bit changes each output bit half the time.
pub fn mix64(bits: u64) -> u64 {
    finish64(bits.wrapping_add(0x9E37_79B9_7F4A_7C15))
}

/// What splitmix64's finisher makes of 64 bits.
pub fn finish64(bits: u64) -> u64 {
    let bits = (bits ^ (bits >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let bits = (bits ^ (bits >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    bits ^ (bits >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secret_path_equals_seed_path() {
        let tokens: Vec<u32> = (0..4096).collect();
        for block_size in [1, 4, 16, 60, 61, 64, 128, 512] {
            for seed in [SEED, 0, u64::MAX] {
                let hashes = block_hashes(&tokens, block_size, seed, &[]);
                assert_eq!(hashes.len(), tokens.len() / block_size);
                for (hash, block) in hashes.iter().zip(tokens.chunks_exact(block_size)) {
                    let bytes: Vec<u8> = block.iter().flat_map(|t| t.to_le_bytes()).collect();
                    assert_eq!(*hash, xxh3_64_with_seed(&bytes, seed));
                }
            }
        }
    }

    #[test]
    fn salts_are_sorted_and_follow_the_tokens() {
        let salted = block_hashes(&[1, 2, 3, 4], 2, SEED, &[vec![9, 3]]);
        let mut bytes: Vec<u8> = [1u32, 2].iter().flat_map(|t| t.to_le_bytes()).collect();
        bytes.extend(3u64.to_le_bytes());
        bytes.extend(9u64.to_le_bytes());
        assert_eq!(salted[0], xxh3_64_with_seed(&bytes, SEED));
        assert_eq!(salted[1], block_hashes(&[3, 4], 2, SEED, &[])[0]);
    }

    #[test]
    fn a_sequence_begins_with_its_block_hash() {
        let chained = sequence_hashes(&[5, 6]);
        assert_eq!(chained[0], 5);
        assert_eq!(chained[1], chain(Some(5), 6));
    }

    #[test]
    fn empty_names_leave_the_seed() {
        assert_eq!(hash_seed("", ""), SEED);
        assert_ne!(hash_seed("a", ""), hash_seed("", "a"));
    }
}
