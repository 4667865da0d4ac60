//! A prompt's hashes, computed once and shared.

use crate::hashing;

/// The hashes of one prompt. Immutable; shared through `Arc` with everything that refers to it.
#[derive(Debug)]
pub struct Prompt {
    pub isl_tokens: usize,
    pub block_size: usize,
    block_hashes: Box<[u64]>,
    sequence_hashes: Box<[u64]>,
}

impl Prompt {
    /// Hashes `tokens`; `mm_hashes[i]`, where present, salts block `i`.
    ///
    /// # Panics
    /// When `block_size` is 0.
    pub fn new(tokens: &[u32], block_size: usize, seed: u64, mm_hashes: &[Vec<u64>]) -> Self {
        Self::from_blocks(
            hashing::block_hashes(tokens, block_size, seed, mm_hashes),
            tokens.len(),
            block_size,
        )
    }

    /// A prompt whose tokens are elsewhere, from the hashes of its leading full blocks. Full blocks beyond
    /// those are like a tail: they have no names here.
    pub fn from_blocks(block_hashes: Vec<u64>, isl_tokens: usize, block_size: usize) -> Self {
        let sequence_hashes = hashing::sequence_hashes(&block_hashes);
        Prompt {
            isl_tokens,
            block_size,
            block_hashes: block_hashes.into(),
            sequence_hashes: sequence_hashes.into(),
        }
    }

    /// The number of full blocks that have hashes.
    pub fn n_blocks(&self) -> usize {
        self.sequence_hashes.len()
    }

    /// The number of blocks that the prompt occupies, a partial tail included.
    pub fn total_blocks(&self) -> usize {
        self.isl_tokens.div_ceil(self.block_size)
    }

    pub fn block_hashes(&self) -> &[u64] {
        &self.block_hashes
    }

    pub fn sequence_hashes(&self) -> &[u64] {
        &self.sequence_hashes
    }
}
