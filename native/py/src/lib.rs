//! `kvrouter._native`: the Python face of the native core. `src/kvrouter/_native.pyi` is its contract.

mod approximate;
mod buffers;
mod checked;
mod content_index;
mod engine_blocks;
mod engine_ranks;
mod events;
mod hashing;
mod index;
mod json;
mod ledger;
mod links;
mod log_text;
mod msgpack;
mod paged_kv;
mod pick;
mod prediction;
mod prefix_set;
mod recording;

use pyo3::prelude::*;

#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<hashing::Prompt>()?;
    module.add_class::<approximate::ApproximateIndex>()?;
    module.add_class::<approximate::ApproximateStats>()?;
    module.add_class::<content_index::ContentIndex>()?;
    module.add_class::<engine_blocks::EngineBlocks>()?;
    module.add_class::<engine_ranks::EngineRanks>()?;
    module.add_class::<events::KvEvents>()?;
    module.add_class::<index::Applied>()?;
    module.add_class::<index::BlockIndex>()?;
    module.add_class::<index::IndexStats>()?;
    module.add_class::<json::JsonBounds>()?;
    module.add_class::<ledger::Column>()?;
    module.add_class::<ledger::Ledger>()?;
    module.add_class::<links::LinkMap>()?;
    module.add_class::<links::Senders>()?;
    module.add_class::<msgpack::MsgpackBounds>()?;
    module.add_class::<paged_kv::PagedKv>()?;
    module.add_class::<prediction::Predictor>()?;
    module.add_class::<prediction::RankColumns>()?;
    module.add_class::<prefix_set::PrefixSet>()?;
    module.add_class::<recording::RecordQueue>()?;
    module.add_function(wrap_pyfunction!(engine_blocks::engine_events, module)?)?;
    module.add_function(wrap_pyfunction!(engine_blocks::engine_names, module)?)?;
    module.add_function(wrap_pyfunction!(engine_blocks::engine_tokens, module)?)?;
    module.add_function(wrap_pyfunction!(hashing::mix64, module)?)?;
    module.add_function(wrap_pyfunction!(hashing::finish64, module)?)?;
    module.add_function(wrap_pyfunction!(hashing::hash_seed, module)?)?;
    module.add_function(wrap_pyfunction!(hashing::block_hashes, module)?)?;
    module.add_function(wrap_pyfunction!(hashing::sequence_hashes, module)?)?;
    module.add_function(wrap_pyfunction!(json::token_ids, module)?)?;
    module.add_function(wrap_pyfunction!(log_text::event_text, module)?)?;
    module.add_function(wrap_pyfunction!(pick::pick_lowest, module)?)?;
    Ok(())
}
