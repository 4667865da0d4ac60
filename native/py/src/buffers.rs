//! What Python and Rust exchange without a copy: token buffers in, u32 columns out, hash columns as bytes.

use pyo3::buffer::PyBuffer;
use pyo3::exceptions::{PyBufferError, PyMemoryError, PyOverflowError, PyTypeError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList, PyTuple};

use crate::checked::{pushed, shown, ITEMS_MAX};

/// Calls `f` with the token ids of `tokens`: a C-contiguous u32 buffer as it lies, any sequence of ints
/// copied.
pub fn with_tokens<R>(tokens: &Bound<'_, PyAny>, f: impl FnOnce(&[u32]) -> R) -> PyResult<R> {
    if tokens.is_instance_of::<PyList>() || tokens.is_instance_of::<PyTuple>() {
        return Ok(f(&sequence_tokens(tokens)?));
    }
    match PyBuffer::<u32>::get(tokens) {
        Ok(buffer) => {
            if buffer.dimensions() != 1 || !buffer.is_c_contiguous() {
                return Err(PyValueError::new_err(
                    "tokens: the buffer has to be C-contiguous with one dimension",
                ));
            }
            // SAFETY: one contiguous dimension of aligned u32 (checked by PyBuffer), kept alive by `buffer`;
            // the interpreter stays attached, so no Python code writes to it while `f` runs.
            let ids = unsafe { slice_of(buffer.buf_ptr().cast::<u32>(), buffer.item_count()) };
            Ok(f(ids))
        }
        Err(_) if is_other_buffer(tokens) || !tokens.hasattr("__len__")? => {
            Err(PyTypeError::new_err(format!(
                "tokens: a buffer of unsigned 32-bit integers or a sequence of ints, not {}",
                described(tokens)
            )))
        }
        Err(_) => Ok(f(&sequence_tokens(tokens)?)),
    }
}

fn is_other_buffer(object: &Bound<'_, PyAny>) -> bool {
    // SAFETY: only asks whether the type fills the buffer slot.
    unsafe { ffi::PyObject_CheckBuffer(object.as_ptr()) == 1 }
}

fn described(object: &Bound<'_, PyAny>) -> String {
    let name = object.get_type().name().map_or_else(|_| "?".into(), |name| name.to_string());
    match object.getattr("dtype") {
        Ok(dtype) => format!("{name} of {dtype}"),
        Err(_) => name,
    }
}

fn sequence_tokens(tokens: &Bound<'_, PyAny>) -> PyResult<Vec<u32>> {
    type GetItem = unsafe extern "C" fn(*mut ffi::PyObject, ffi::Py_ssize_t) -> *mut ffi::PyObject;
    let n_tokens = tokens.len()?;
    if n_tokens > ITEMS_MAX {
        return Err(PyValueError::new_err(format!(
            "tokens: at most {ITEMS_MAX} items of a sequence, not {n_tokens}"
        )));
    }
    let mut ids = Vec::new();
    let get_item: GetItem = if tokens.is_instance_of::<PyList>() {
        ffi::PyList_GetItem
    } else if tokens.is_instance_of::<PyTuple>() {
        ffi::PyTuple_GetItem
    } else {
        for item in tokens.try_iter()? {
            let id = token(&item?, ids.len())?;
            pushed(&mut ids, id, "tokens")?;
        }
        return Ok(ids);
    };
    ids.try_reserve_exact(n_tokens)
        .map_err(|_| PyMemoryError::new_err("tokens: there is no memory for so much"))?;
    for position in 0..n_tokens {
        // SAFETY: the type fits the function. The borrowed item stays in its sequence: reading a plain int runs no code,
        // and for anything else a reference is taken first.
        let id = unsafe {
            let item = get_item(tokens.as_ptr(), position as ffi::Py_ssize_t);
            match plain_token(item) {
                Some(id) => id,
                None => token(&Bound::from_borrowed_ptr_or_err(tokens.py(), item)?, position)?,
            }
        };
        ids.push(id);
    }
    Ok(ids)
}

/// The id, when the item is exactly an int, and one that fits.
///
/// # Safety
/// The item has to be alive, or null.
#[inline]
unsafe fn plain_token(item: *mut ffi::PyObject) -> Option<u32> {
    if item.is_null() || ffi::PyLong_CheckExact(item) == 0 {
        return None;
    }
    let id = ffi::PyLong_AsLongLong(item);
    if id == -1 {
        ffi::PyErr_Clear();
    }
    u32::try_from(id).ok()
}

fn token(item: &Bound<'_, PyAny>, position: usize) -> PyResult<u32> {
    item.extract::<u32>().map_err(|error| token_error(position, item, &error))
}

fn token_error(position: usize, item: &Bound<'_, PyAny>, error: &PyErr) -> PyErr {
    if error.is_instance_of::<PyOverflowError>(item.py()) {
        PyOverflowError::new_err(format!("tokens[{position}]: {} is not within 0..4294967295", shown(item)))
    } else {
        PyTypeError::new_err(format!("tokens[{position}]: an int, not {}", described(item)))
    }
}

/// A writable u32 column over slots, borrowed for one call.
pub struct OutColumn(PyBuffer<u32>);

impl OutColumn {
    pub fn get(out: &Bound<'_, PyAny>) -> PyResult<Self> {
        let buffer = PyBuffer::<u32>::get(out).map_err(|_| {
            PyTypeError::new_err(format!("out: a buffer of unsigned 32-bit integers, not {}", described(out)))
        })?;
        if buffer.readonly() {
            return Err(PyBufferError::new_err("out: the buffer is read-only"));
        }
        if buffer.dimensions() != 1 || !buffer.is_c_contiguous() {
            return Err(PyValueError::new_err("out: the buffer has to be C-contiguous with one dimension"));
        }
        Ok(OutColumn(buffer))
    }

    /// The column's memory. The caller stays attached to the interpreter while it is borrowed.
    pub fn as_mut_slice(&mut self, _attached: Python<'_>) -> &mut [u32] {
        if self.0.item_count() == 0 {
            return &mut [];
        }
        // SAFETY: one contiguous, writable dimension of aligned u32, kept alive by the buffer; while the
        // caller is attached no other thread runs Python code that could alias it.
        unsafe { std::slice::from_raw_parts_mut(self.0.buf_ptr().cast::<u32>(), self.0.item_count()) }
    }
}

/// Writable bytes, borrowed for one call.
pub struct OutBytes(PyBuffer<u8>);

impl OutBytes {
    pub fn get(out: &Bound<'_, PyAny>) -> PyResult<Self> {
        let buffer = PyBuffer::<u8>::get(out)?;
        if buffer.readonly() || !buffer.is_c_contiguous() {
            return Err(PyBufferError::new_err("out: the buffer has to be writable and C-contiguous"));
        }
        Ok(OutBytes(buffer))
    }

    /// The memory.
    ///
    /// # Safety
    /// Nobody else may read or write it while it is borrowed, other threads included.
    pub unsafe fn as_mut_slice(&mut self) -> &mut [u8] {
        if self.0.item_count() == 0 {
            return &mut [];
        }
        // SAFETY: contiguous, writable and kept alive by the buffer; the caller has it alone.
        unsafe { std::slice::from_raw_parts_mut(self.0.buf_ptr().cast::<u8>(), self.0.item_count()) }
    }
}

/// # Safety
/// `pointer` has to be valid for `len` reads unless `len` is 0.
unsafe fn slice_of<'a, T>(pointer: *const T, len: usize) -> &'a [T] {
    if len == 0 {
        &[]
    } else {
        std::slice::from_raw_parts(pointer, len)
    }
}

/// Hashes as a column: 8 bytes each, little-endian.
pub fn to_column<'py>(py: Python<'py>, hashes: &[u64]) -> PyResult<Bound<'py, PyBytes>> {
    PyBytes::new_with(py, hashes.len() * 8, |bytes| {
        for (chunk, hash) in bytes.chunks_exact_mut(8).zip(hashes) {
            chunk.copy_from_slice(&hash.to_le_bytes());
        }
        Ok(())
    })
}

/// Appends the hashes of a column to `hashes`; `name` is what an error calls the column.
pub fn extend_from_column(hashes: &mut Vec<u64>, column: &[u8], name: &str) -> PyResult<()> {
    if column.len() % 8 != 0 {
        return Err(PyValueError::new_err(format!(
            "{name}: a column of 8-byte hashes, not {} bytes",
            column.len()
        )));
    }
    hashes
        .try_reserve(column.len() / 8)
        .map_err(|_| PyMemoryError::new_err(format!("{name}: there is no memory for so much")))?;
    hashes.extend(column.chunks_exact(8).map(|chunk| u64::from_le_bytes(chunk.try_into().expect("8 bytes"))));
    Ok(())
}
