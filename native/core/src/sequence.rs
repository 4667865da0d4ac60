//! One leg inside a mock engine: how far it is, and what its reader was not told yet.

/// What a leg says: its blocks have hashes, and its output may stop it.
pub trait Content {
    type Error;

    /// Appends the hashes of its full blocks from `known` to `n_blocks` to `hashes`.
    fn hash_blocks(
        &mut self,
        known: usize,
        n_blocks: usize,
        hashes: &mut Vec<u64>,
    ) -> Result<(), Self::Error>;

    /// Whether the output ends with its token number `n_output`, counted from 1.
    fn stops(&mut self, n_output: u64) -> Result<bool, Self::Error>;
}

/// What an engine has to know of a leg that comes.
pub struct Submitted<C> {
    pub content: C,
    /// Of the leading full blocks of its prompt, as far as they are known.
    pub hashes: Vec<u64>,
    pub prompt_tokens: u64,
    pub max_tokens: u64,
    pub credit_tokens: i64,
    pub may_stop: bool,
    /// The leading tokens of its prompt whose KV comes from elsewhere; 0 without any.
    pub remote_tokens: u64,
    /// Its KV stays when it ends, until it is released.
    pub pins_kv: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    Waiting,
    Receiving,
    Ready,
    Running,
    Parked,
    Ended,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    Length,
    Stop,
    /// Somebody ended it.
    Dropped,
}

/// Of steps that are planned and have not ended, it computes `planned_tokens` and generates `planned_outputs`.
pub(crate) struct Sequence<C> {
    /// As it came; its credit, and the KV that it still wants, change.
    pub leg: Submitted<C>,
    pub n_tokens: u64,
    pub state: State,
    pub prefilling: bool,
    pub table: Option<u64>,
    pub room_tokens: u64,
    pub computed_tokens: u64,
    pub planned_tokens: u64,
    pub planned_outputs: u64,
    pub output_tokens: u64,
    pub cached_tokens: Option<u64>,
    pub is_cached_reported: bool,
    pub first_s: Option<f64>,
    pub pending_tokens: u64,
    pub is_dirty: bool,
    pub finish: Option<Finish>,
}

impl<C: Content> Sequence<C> {
    pub fn new(leg: Submitted<C>) -> Self {
        Sequence {
            n_tokens: leg.prompt_tokens,
            leg,
            state: State::Waiting,
            prefilling: true,
            table: None,
            room_tokens: 0,
            computed_tokens: 0,
            planned_tokens: 0,
            planned_outputs: 0,
            output_tokens: 0,
            cached_tokens: None,
            is_cached_reported: false,
            first_s: None,
            pending_tokens: 0,
            is_dirty: false,
            finish: None,
        }
    }

    /// Tokens whose KV is still to be computed.
    pub fn remaining_tokens(&self) -> u64 {
        self.n_tokens - self.computed_tokens
    }

    /// Makes sure that the first `n_blocks` blocks, all of them full, have their hashes.
    pub fn hash_blocks(&mut self, n_blocks: usize) -> Result<(), C::Error> {
        let known = self.leg.hashes.len();
        if n_blocks > known {
            self.leg.content.hash_blocks(known, n_blocks, &mut self.leg.hashes)?;
        }
        Ok(())
    }
}
