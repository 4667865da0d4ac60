//! KV events from engines in any language: the C interface of `include/kvrouter.h`. It reads the arguments from C,
//! and no panic leaves it.

mod address;
mod frames;
mod link;
mod mirror;
mod publisher;

use std::ffi::{c_char, c_int, CStr};
use std::mem::size_of;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::time::Duration;

use address::Address;
use publisher::{Blocks, Publisher, Refused, Settings};

const OK: c_int = 0;
const INVALID: c_int = -1;
const UNKNOWN_PARENT: c_int = -2;
const FULL: c_int = -3;
const TIMEOUT: c_int = -4;
const BUG: c_int = -99;

const QUEUE_BYTES_MAX: u64 = 8 << 20;
const HELD_BLOCKS_MAX: u64 = 16_000_000;
const TOKEN_BYTES_MAX: usize = 1024;
const ERROR_BYTES: usize = 256;

/// `kvr_config`.
#[repr(C)]
pub struct Config {
    struct_bytes: usize,
    address: *const c_char,
    token: *const c_char,
    block_size: u32,
    queue_bytes_max: u64,
    held_blocks_max: u64,
}

/// `kvr_load_report`.
#[repr(C)]
pub struct LoadReport {
    active_blocks: u64,
    total_blocks: u64,
    active_prefill_tokens: u64,
    running_requests: u64,
    waiting_requests: u64,
}

/// `kvr_state`.
#[repr(C)]
pub struct State {
    struct_bytes: usize,
    connected: u32,
    queued_bytes: u64,
    queued_events: u64,
    held_blocks: u64,
    connections: u64,
    replacements: u64,
    overflows: u64,
    dropped_events: u64,
    unknown_parents: u64,
    unknown_removed: u64,
    error: [c_char; ERROR_BYTES],
}

/// The version, as text that lives as long as the program.
#[no_mangle]
pub extern "C" fn kvr_version() -> *const c_char {
    const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), "\0");
    VERSION.as_ptr().cast()
}

/// What a code means, as text that lives as long as the program.
#[no_mangle]
pub extern "C" fn kvr_message(code: c_int) -> *const c_char {
    let text = match code {
        OK => c"done",
        INVALID => c"an argument is invalid: nothing was done",
        UNKNOWN_PARENT => c"the parent block is not held: nothing was done",
        FULL => c"held_blocks_max is reached: these blocks are not published",
        TIMEOUT => c"the worker has not taken everything yet",
        BUG => c"a mistake of the library's",
        _ => c"no code of this library's",
    };
    text.as_ptr()
}

/// # Safety
/// `config` points to a `kvr_config` of its `struct_bytes`; `error` to `error_bytes` writable bytes, or is NULL.
#[no_mangle]
pub unsafe extern "C" fn kvr_publisher_open(
    config: *const Config,
    error: *mut c_char,
    error_bytes: usize,
) -> *mut Publisher {
    let opened = catch_unwind(AssertUnwindSafe(|| {
        let settings = unsafe { settings(config) }?;
        Publisher::open(settings).map_err(|error| format!("no thread can be started: {error}"))
    }));
    let why = match opened {
        Ok(Ok(publisher)) => return Box::into_raw(Box::new(publisher)),
        Ok(Err(why)) => why,
        Err(_) => "a mistake of the library's".to_owned(),
    };
    if !error.is_null() {
        write_text(unsafe { std::slice::from_raw_parts_mut(error, error_bytes) }, &why);
    }
    std::ptr::null_mut()
}

/// # Safety
/// `publisher` is open; the arrays have the lengths that are given; `parent` is one number, or NULL; the names
/// end with NUL, or are NULL.
#[no_mangle]
pub unsafe extern "C" fn kvr_stored(
    publisher: *mut Publisher,
    dp_rank: u32,
    token_ids: *const u32,
    n_tokens: usize,
    engine_hashes: *const u64,
    n_blocks: usize,
    parent: *const u64,
    lora_name: *const c_char,
    cache_namespace: *const c_char,
    medium: c_int,
) -> c_int {
    guarded(publisher, |publisher| {
        let blocks = unsafe {
            Blocks {
                token_ids: array(token_ids, n_tokens)?,
                engine_hashes: array(engine_hashes, n_blocks)?,
                parent: parent.as_ref().copied(),
                lora_name: text(lora_name)?,
                cache_namespace: text(cache_namespace)?,
                medium: medium_of(medium)?,
            }
        };
        publisher.stored(dp_rank, &blocks)
    })
}

/// # Safety
/// `publisher` is open; `engine_hashes` has `n_blocks` elements.
#[no_mangle]
pub unsafe extern "C" fn kvr_removed(
    publisher: *mut Publisher,
    dp_rank: u32,
    engine_hashes: *const u64,
    n_blocks: usize,
    medium: c_int,
) -> c_int {
    guarded(publisher, |publisher| {
        let engine_hashes = unsafe { array(engine_hashes, n_blocks) }?;
        publisher.removed(dp_rank, engine_hashes, medium_of(medium)?)
    })
}

/// # Safety
/// `publisher` is open.
#[no_mangle]
pub unsafe extern "C" fn kvr_cleared(publisher: *mut Publisher, dp_rank: u32) -> c_int {
    guarded(publisher, |publisher| publisher.cleared(dp_rank))
}

/// # Safety
/// `publisher` is open; `report` is one report.
#[no_mangle]
pub unsafe extern "C" fn kvr_load(
    publisher: *mut Publisher,
    dp_rank: u32,
    report: *const LoadReport,
) -> c_int {
    guarded(publisher, |publisher| {
        let report = unsafe { report.as_ref() }.ok_or(Refused::Invalid)?;
        let load = frames::Load {
            active_blocks: report.active_blocks,
            total_blocks: report.total_blocks,
            active_prefill_tokens: report.active_prefill_tokens,
            running_requests: report.running_requests,
            waiting_requests: report.waiting_requests,
        };
        publisher.load(dp_rank, load)
    })
}

/// # Safety
/// `publisher` is open.
#[no_mangle]
pub unsafe extern "C" fn kvr_flush(publisher: *mut Publisher, timeout_ms: u32) -> c_int {
    guarded(publisher, |publisher| publisher.flush(Duration::from_millis(timeout_ms.into())))
}

/// # Safety
/// `publisher` is open; `state` has as many bytes as its `struct_bytes` says.
#[no_mangle]
pub unsafe extern "C" fn kvr_status(publisher: *mut Publisher, state: *mut State) -> c_int {
    guarded(publisher, |publisher| {
        if state.is_null() || unsafe { (*state).struct_bytes } != size_of::<State>() {
            return Err(Refused::Invalid);
        }
        let status = publisher.status();
        let mut error = [0; ERROR_BYTES];
        write_text(&mut error, &status.error);
        let filled = State {
            struct_bytes: size_of::<State>(),
            connected: status.connected.into(),
            queued_bytes: status.queued_bytes as u64,
            queued_events: status.queued_events,
            held_blocks: status.held_blocks as u64,
            connections: status.counts.connections,
            replacements: status.counts.replacements,
            overflows: status.counts.overflows,
            dropped_events: status.counts.dropped_events,
            unknown_parents: status.counts.unknown_parents,
            unknown_removed: status.counts.unknown_removed,
            error,
        };
        unsafe { state.write(filled) };
        Ok(())
    })
}

/// # Safety
/// `publisher` is open, or NULL; nobody uses it any more.
#[no_mangle]
pub unsafe extern "C" fn kvr_close(publisher: *mut Publisher) {
    if !publisher.is_null() {
        // Nobody is left who could receive an error.
        drop(catch_unwind(AssertUnwindSafe(|| drop(unsafe { Box::from_raw(publisher) }))));
    }
}

fn guarded(publisher: *mut Publisher, call: impl FnOnce(&Publisher) -> Result<(), Refused>) -> c_int {
    let Some(publisher) = (unsafe { publisher.as_ref() }) else { return INVALID };
    match catch_unwind(AssertUnwindSafe(|| call(publisher))) {
        Ok(Ok(())) => OK,
        Ok(Err(Refused::Invalid)) => INVALID,
        Ok(Err(Refused::UnknownParent)) => UNKNOWN_PARENT,
        Ok(Err(Refused::Full)) => FULL,
        Ok(Err(Refused::Timeout)) => TIMEOUT,
        Err(_) => BUG,
    }
}

unsafe fn settings(config: *const Config) -> Result<Settings, String> {
    let config = unsafe { config.as_ref() }.ok_or("config: is NULL")?;
    if config.struct_bytes != size_of::<Config>() {
        return Err(format!("struct_bytes: {} is not sizeof(kvr_config)", config.struct_bytes));
    }
    if config.block_size == 0 {
        return Err("block_size: must be at least 1".to_owned());
    }
    let address = unsafe { text(config.address) }.map_err(|_| "address: is not UTF-8")?;
    let token = unsafe { text(config.token) }.map_err(|_| "token: is not UTF-8")?;
    if token.len() > TOKEN_BYTES_MAX {
        return Err(format!("token: is longer than {TOKEN_BYTES_MAX} bytes"));
    }
    let or = |given: u64, default: u64| if given == 0 { default } else { given } as usize;
    Ok(Settings {
        address: Address::parse(address)?,
        token: token.to_owned(),
        block_size: config.block_size as usize,
        queue_bytes_max: or(config.queue_bytes_max, QUEUE_BYTES_MAX),
        held_blocks_max: or(config.held_blocks_max, HELD_BLOCKS_MAX),
    })
}

/// NULL is an empty array where no elements are promised.
unsafe fn array<'a, T>(first: *const T, length: usize) -> Result<&'a [T], Refused> {
    if length == 0 {
        return Ok(&[]);
    }
    if first.is_null() || !first.is_aligned() || length > isize::MAX as usize / size_of::<T>() {
        return Err(Refused::Invalid);
    }
    Ok(unsafe { std::slice::from_raw_parts(first, length) })
}

unsafe fn text<'a>(text: *const c_char) -> Result<&'a str, Refused> {
    if text.is_null() {
        return Ok("");
    }
    unsafe { CStr::from_ptr(text) }.to_str().map_err(|_| Refused::Invalid)
}

fn medium_of(medium: c_int) -> Result<usize, Refused> {
    usize::try_from(medium).map_err(|_| Refused::Invalid)
}

/// Copies as much of `text` as fits, and a NUL.
fn write_text(into: &mut [c_char], text: &str) {
    let Some(room) = into.len().checked_sub(1) else { return };
    let mut n_bytes = room.min(text.len());
    while !text.is_char_boundary(n_bytes) {
        n_bytes -= 1;
    }
    for (to, from) in into.iter_mut().zip(&text.as_bytes()[..n_bytes]) {
        *to = *from as c_char;
    }
    into[n_bytes] = 0;
}
