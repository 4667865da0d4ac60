//! The algorithms of kvrouter's native core. Nothing here knows Python, time or threads.

pub mod hashing;
pub mod prompt;
