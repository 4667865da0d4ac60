//! Whole numbers from Python, for `from_py_with`: one out of range is refused by the argument's name. And memory that
//! cannot be had is an error, not the end of the process.

use kvrouter_core::index::{MEDIA, SLOTS_MAX};
use pyo3::exceptions::{PyMemoryError, PyOverflowError, PyValueError};
use pyo3::prelude::*;

/// The most tokens that a prompt, or what is left of one, is said to have.
pub const TOKENS_MAX: u64 = u32::MAX as u64;

/// The most items that are copied out of a Python sequence.
pub const ITEMS_MAX: usize = 1 << 28;

/// A number as text; one of thousands of digits has none.
pub fn shown(value: &Bound<'_, PyAny>) -> String {
    value.str().map_or_else(|_| "a larger number".into(), |text| text.to_string())
}

fn whole(name: &str, value: &Bound<'_, PyAny>, max: u64) -> PyResult<u64> {
    match value.extract::<u64>() {
        Ok(number) if number <= max => Ok(number),
        Err(error) if !error.is_instance_of::<PyOverflowError>(value.py()) => Err(error),
        _ => Err(PyValueError::new_err(format!("{name}: within 0..{max}, not {}", shown(value)))),
    }
}

pub fn slot(value: &Bound<'_, PyAny>) -> PyResult<u32> {
    Ok(whole("slot", value, SLOTS_MAX as u64 - 1)? as u32)
}

pub fn n_slots(value: &Bound<'_, PyAny>) -> PyResult<usize> {
    Ok(whole("n_slots", value, SLOTS_MAX as u64)? as usize)
}

pub fn medium(value: &Bound<'_, PyAny>) -> PyResult<usize> {
    Ok(whole("medium", value, MEDIA as u64 - 1)? as usize)
}

pub fn prefill_tokens(value: &Bound<'_, PyAny>) -> PyResult<i64> {
    Ok(whole("prefill_tokens", value, TOKENS_MAX)? as i64)
}

pub fn isl_tokens(value: &Bound<'_, PyAny>) -> PyResult<usize> {
    Ok(whole("isl_tokens", value, TOKENS_MAX)? as usize)
}

/// Tokens of one leg of a mock engine, of which it has at least one.
pub fn n_tokens(value: &Bound<'_, PyAny>) -> PyResult<u64> {
    match whole("tokens", value, TOKENS_MAX)? {
        0 => Err(PyValueError::new_err("tokens: at least 1")),
        n_tokens => Ok(n_tokens),
    }
}

pub fn seed(value: &Bound<'_, PyAny>) -> PyResult<u64> {
    whole("seed", value, u64::MAX)
}

pub fn lease(value: &Bound<'_, PyAny>) -> PyResult<u64> {
    whole("lease", value, u64::MAX)
}

pub fn exclude(value: &Bound<'_, PyAny>) -> PyResult<Option<u64>> {
    if value.is_none() {
        return Ok(None);
    }
    whole("exclude", value, u64::MAX).map(Some)
}

pub fn n_output_blocks(value: &Bound<'_, PyAny>) -> PyResult<u32> {
    Ok(whole("n", value, u64::from(u32::MAX))? as u32)
}

pub fn place(value: &Bound<'_, PyAny>) -> PyResult<u64> {
    whole("place", value, u64::MAX)
}

pub fn max_blocks(value: &Bound<'_, PyAny>) -> PyResult<usize> {
    Ok(whole("max_blocks", value, isize::MAX as u64)? as usize)
}

/// Blocks of a mock engine's memory: their numbers have 32 bits.
pub fn total_blocks(value: &Bound<'_, PyAny>) -> PyResult<usize> {
    Ok(whole("total_blocks", value, u64::from(u32::MAX) - 2)? as usize)
}

pub fn blocks_per_rank_max(value: &Bound<'_, PyAny>) -> PyResult<usize> {
    Ok(whole("blocks_per_rank_max", value, isize::MAX as u64)? as usize)
}

/// The router, the request and the leg of a lease.
pub fn key(value: &Bound<'_, PyAny>) -> PyResult<(String, String, u32)> {
    let (router_id, request_id, leg) = value.extract::<(String, String, Bound<'_, PyAny>)>()?;
    Ok((router_id, request_id, whole("key: leg number", &leg, u64::from(u32::MAX))? as u32))
}

pub fn block_size(value: &Bound<'_, PyAny>) -> PyResult<usize> {
    match value.extract::<i64>() {
        Ok(size) if size < 1 => {
            Err(PyValueError::new_err(format!("block_size: at least 1 token, not {}", shown(value))))
        }
        Ok(size) if size as u64 <= TOKENS_MAX => Ok(size as usize),
        Err(error) if !error.is_instance_of::<PyOverflowError>(value.py()) => Err(error),
        _ if value.lt(0)? => {
            Err(PyValueError::new_err(format!("block_size: at least 1 token, not {}", shown(value))))
        }
        _ => Err(PyOverflowError::new_err(format!(
            "block_size: at most 4294967295 tokens, not {}",
            shown(value)
        ))),
    }
}

/// The hashes of multimodal objects for each full block.
pub fn mm_hashes(value: &Bound<'_, PyAny>) -> PyResult<Option<Vec<Vec<u64>>>> {
    if value.is_none() {
        return Ok(None);
    }
    let mut blocks = Vec::new();
    for block in value.try_iter()? {
        let mut hashes = Vec::new();
        for hash in block?.try_iter()? {
            pushed(&mut hashes, whole("mm_hashes", &hash?, u64::MAX)?, "mm_hashes")?;
        }
        pushed(&mut blocks, hashes, "mm_hashes")?;
    }
    Ok(Some(blocks))
}

/// Appends one item of a sequence of unknown length.
pub fn pushed<T>(items: &mut Vec<T>, item: T, name: &str) -> PyResult<()> {
    if items.len() >= ITEMS_MAX {
        return Err(PyValueError::new_err(format!("{name}: at most {ITEMS_MAX} items")));
    }
    items.try_reserve(1).map_err(|_| no_memory(name))?;
    items.push(item);
    Ok(())
}

/// Fails when the system would not give memory for so many hashes: what is made of them then has room.
pub fn room_for_hashes(n_hashes: usize, name: &str) -> PyResult<()> {
    Vec::<u64>::new().try_reserve_exact(n_hashes).map_err(|_| no_memory(name))
}

fn no_memory(name: &str) -> PyErr {
    PyMemoryError::new_err(format!("{name}: there is no memory for so much"))
}
