//! The algorithms of kvrouter's native core. Nothing here knows Python, time or threads.

pub mod approximate;
mod blocks;
mod events;
pub mod hashing;
mod holders;
pub mod index;
pub mod json;
pub mod ledger;
pub mod links;
pub mod msgpack;
mod overlap;
pub mod paged_kv;
mod pages;
pub mod pairs;
mod paths;
pub mod prediction;
pub mod prefix_set;
pub mod prompt;
mod rank;
pub mod ranks;
pub mod recording;
pub mod scheduler;
pub mod sequence;
mod shard;
mod table;
pub mod timing;
pub mod token_ids;
