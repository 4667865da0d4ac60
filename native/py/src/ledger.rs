//! `Ledger` and the columns that Python reads in place.

use std::ffi::{c_int, c_void};
use std::sync::{Mutex, MutexGuard, PoisonError};

use kvrouter_core::ledger::{self, NotBooked};
use pyo3::exceptions::{PyBufferError, PyOverflowError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;

use crate::buffers::OutColumn;
use crate::checked;
use crate::hashing::Prompt;

pyo3::import_exception!(kvrouter.kernel.ledger.port, LeaseExists);

/// A signed 64-bit count for each slot, as a read-only buffer (`memoryview`, `numpy.asarray`). It shows every
/// change, until the ledger grows and hands out longer ones.
#[pyclass(frozen, module = "kvrouter._native")]
pub struct Column {
    values: ledger::Column,
    shape: [isize; 1],
}

#[pymethods]
impl Column {
    fn __len__(&self) -> usize {
        self.values.len()
    }

    /// # Safety
    /// Called by the interpreter, with a view to fill.
    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        if view.is_null() {
            return Err(PyBufferError::new_err("no view to fill"));
        }
        // SAFETY: the view is valid; a refused request has to leave it without an owner.
        unsafe { (*view).obj = std::ptr::null_mut() };
        if flags & ffi::PyBUF_WRITABLE == ffi::PyBUF_WRITABLE {
            return Err(PyBufferError::new_err("the column is read-only"));
        }
        let column = slf.get();
        let wants = |flag: c_int| flags & flag == flag;
        // SAFETY: the view is valid; what it points to lives in the column, which `obj` keeps alive.
        unsafe {
            (*view).buf = column.values.as_ptr().cast::<c_void>().cast_mut();
            (*view).len = size_of_val(&*column.values) as isize;
            (*view).readonly = 1;
            (*view).itemsize = size_of::<i64>() as isize;
            (*view).format =
                if wants(ffi::PyBUF_FORMAT) { c"q".as_ptr().cast_mut() } else { std::ptr::null_mut() };
            (*view).ndim = 1;
            (*view).shape = column.shape.as_ptr().cast_mut();
            (*view).strides =
                if wants(ffi::PyBUF_STRIDES) { &raw mut (*view).itemsize } else { std::ptr::null_mut() };
            (*view).suboffsets = std::ptr::null_mut();
            (*view).internal = std::ptr::null_mut();
            (*view).obj = slf.into_ptr();
        }
        Ok(())
    }
}

impl Column {
    fn of(values: &ledger::Column) -> Self {
        Column { values: values.clone(), shape: [values.len() as isize] }
    }
}

#[pyclass(frozen, subclass, module = "kvrouter._native")]
pub struct Ledger(Mutex<ledger::Ledger>);

#[pymethods]
impl Ledger {
    #[new]
    #[pyo3(signature = (n_slots=64))]
    fn new(#[pyo3(from_py_with = checked::n_slots)] n_slots: usize) -> Self {
        Ledger(Mutex::new(ledger::Ledger::new(n_slots)))
    }

    fn ensure_slots(&self, #[pyo3(from_py_with = checked::n_slots)] n_slots: usize) -> bool {
        self.lock().ensure_slots(n_slots)
    }

    #[getter]
    fn n_slots(&self) -> usize {
        self.lock().n_slots()
    }

    #[getter]
    fn prefill_tokens(&self) -> Column {
        Column::of(self.lock().prefill_tokens())
    }

    #[getter]
    fn active_blocks(&self) -> Column {
        Column::of(self.lock().active_blocks())
    }

    #[getter]
    fn requests(&self) -> Column {
        Column::of(self.lock().requests())
    }

    #[getter]
    fn waiting(&self) -> Column {
        Column::of(self.lock().waiting())
    }

    #[pyo3(signature = (*, key, slot, prompt, prefill_tokens, track_blocks=true))]
    fn book(
        &self,
        #[pyo3(from_py_with = checked::key)] key: (String, String, u32),
        #[pyo3(from_py_with = checked::slot)] slot: u32,
        prompt: &Prompt,
        #[pyo3(from_py_with = checked::prefill_tokens)] prefill_tokens: i64,
        track_blocks: bool,
    ) -> PyResult<u64> {
        let key = lease_key(key);
        let mut ledger = self.lock();
        match ledger.book(key.clone(), slot, &prompt.inner, prefill_tokens, track_blocks) {
            Ok(id) => Ok(id),
            Err(NotBooked::NoSuchSlot) => Err(no_such_slot(slot, ledger.n_slots())),
            Err(NotBooked::TooMuch) => Err(too_much()),
            Err(NotBooked::LeaseExists) => Err(LeaseExists::new_err((
                key.router_id.into_string(),
                key.request_id.into_string(),
                key.leg_number,
            ))),
        }
    }

    fn find(&self, #[pyo3(from_py_with = checked::key)] key: (String, String, u32)) -> Option<u64> {
        self.lock().find(&lease_key(key))
    }

    fn first_token(&self, #[pyo3(from_py_with = checked::lease)] lease: u64) -> bool {
        self.lock().first_token(lease)
    }

    #[pyo3(signature = (lease, n=1))]
    fn output_block(
        &self,
        #[pyo3(from_py_with = checked::lease)] lease: u64,
        #[pyo3(from_py_with = checked::n_output_blocks)] n: u32,
    ) -> PyResult<bool> {
        self.lock().output_block(lease, n).map_err(|_| too_much())
    }

    fn close(&self, #[pyo3(from_py_with = checked::lease)] lease: u64) -> bool {
        self.lock().close(lease)
    }

    #[pyo3(name = "move")]
    fn move_to(
        &self,
        #[pyo3(from_py_with = checked::lease)] lease: u64,
        #[pyo3(from_py_with = checked::slot)] slot: u32,
        #[pyo3(from_py_with = checked::prefill_tokens)] prefill_tokens: i64,
    ) -> PyResult<bool> {
        let mut ledger = self.lock();
        let n_slots = ledger.n_slots();
        ledger.move_to(lease, slot, prefill_tokens).map_err(|why| match why {
            NotBooked::TooMuch => too_much(),
            _ => no_such_slot(slot, n_slots),
        })
    }

    #[pyo3(signature = (prompt, out, exclude=None))]
    fn not_active(
        &self,
        py: Python<'_>,
        prompt: &Prompt,
        out: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = checked::exclude)] exclude: Option<u64>,
    ) -> PyResult<()> {
        let mut out = OutColumn::get(out)?;
        self.lock().not_active(&prompt.inner, exclude, out.as_mut_slice(py));
        Ok(())
    }

    fn drop_slot(&self, #[pyo3(from_py_with = checked::slot)] slot: u32) -> PyResult<usize> {
        Ok(self.lock().drop_slot(slot))
    }

    fn drop_router(&self, router_id: &str) -> usize {
        self.lock().drop_router(router_id)
    }

    fn __len__(&self) -> usize {
        self.lock().len()
    }

    #[getter]
    fn n_runs(&self) -> usize {
        self.lock().n_runs()
    }
}

impl Ledger {
    /// Nobody gives the interpreter up while holding the ledger, so this never waits long.
    fn lock(&self) -> MutexGuard<'_, ledger::Ledger> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn lease_key((router_id, request_id, leg_number): (String, String, u32)) -> ledger::LeaseKey {
    ledger::LeaseKey { router_id: router_id.into(), request_id: request_id.into(), leg_number }
}

fn too_much() -> PyErr {
    PyOverflowError::new_err("the slot's sum would be over 9223372036854775807")
}

fn no_such_slot(slot: u32, n_slots: usize) -> PyErr {
    PyValueError::new_err(format!("slot: within the {n_slots} of ensure_slots, not {slot}"))
}
