//! `kvrouter._native`: the Python face of the native core. `src/kvrouter/_native.pyi` is its contract.

mod buffers;
mod hashing;

use pyo3::prelude::*;

#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<hashing::Prompt>()?;
    module.add_function(wrap_pyfunction!(hashing::hash_seed, module)?)?;
    module.add_function(wrap_pyfunction!(hashing::block_hashes, module)?)?;
    module.add_function(wrap_pyfunction!(hashing::sequence_hashes, module)?)?;
    Ok(())
}
