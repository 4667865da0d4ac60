//! KV events as the index reads them, and what becomes of their blocks.

/// What became of the events that were applied, in blocks.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct Applied {
    pub stored: u64,
    pub repeated: u64,
    pub replaced: u64,
    pub removed: u64,
    pub unknown_removed: u64,
    pub orphaned: u64,
    pub cleared: u64,
    pub over_limit: u64,
}

/// One KV event; hashes are columns of equal length.
pub enum Event<'a> {
    Stored {
        parent: Option<u64>,
        engine_hashes: &'a [u64],
        block_hashes: &'a [u64],
        medium: usize,
    },
    Removed {
        engine_hashes: &'a [u64],
        medium: usize,
    },
    Cleared,
    /// Blocks named by sequence hash, as in a snapshot.
    Held {
        engine_hashes: &'a [u64],
        sequence_hashes: &'a [u64],
        medium: usize,
    },
}

impl Event<'_> {
    /// The blocks that the event names.
    pub fn n_blocks(&self) -> usize {
        match self {
            Event::Stored { engine_hashes, .. }
            | Event::Removed { engine_hashes, .. }
            | Event::Held { engine_hashes, .. } => engine_hashes.len(),
            Event::Cleared => 0,
        }
    }
}

/// Blocks of one medium at one rank, as a snapshot lists them.
pub struct HeldColumns {
    pub medium: usize,
    pub engine_hashes: Vec<u64>,
    pub sequence_hashes: Vec<u64>,
}
