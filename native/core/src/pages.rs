//! Pages of 4 KiB that tables are made of, taken from the operating system in slabs and given back.
//!
//! The allocator of the process cannot promise that memory returns: a few live bytes keep a heap. Here a
//! freed page beyond a small reserve goes back at once, and the slabs themselves when the last page is free.

use std::ptr::NonNull;

/// Bytes of one page.
pub const PAGE_BYTES: usize = 4096;

const SLAB_PAGES: usize = 512;
const SLAB_BYTES: usize = PAGE_BYTES * SLAB_PAGES;

/// Free pages kept ready, so that a steady churn makes no system calls.
const RESERVE_PAGES: usize = SLAB_PAGES;

/// One page, owned by the caller that took it from the pool, until it is returned or the pool is dropped.
pub type Page = NonNull<u8>;

/// A pool of pages. Dropping it frees every page, given back or not.
#[derive(Default)]
pub struct PagePool {
    slabs: Vec<Page>,
    /// Pages of the last slab that were never taken.
    n_fresh: usize,
    /// Free pages that are still in memory.
    ready: Vec<Page>,
    /// Free pages whose memory went back.
    discarded: Vec<Page>,
    n_used: usize,
}

// SAFETY: the pool owns its slabs; no page is shared between pools or reachable without the pool's owner.
unsafe impl Send for PagePool {}
// SAFETY: a shared pool is only read (counts).
unsafe impl Sync for PagePool {}

impl PagePool {
    /// Takes a page; its bytes are unspecified.
    #[inline]
    pub fn take(&mut self) -> Page {
        self.n_used += 1;
        self.ready.pop().or_else(|| self.discarded.pop()).unwrap_or_else(|| self.take_fresh())
    }

    /// Gives a page back. The caller keeps no pointer into it.
    pub fn give_back(&mut self, page: Page) {
        self.n_used -= 1;
        if self.n_used == 0 {
            self.release_slabs();
        } else if self.ready.len() < RESERVE_PAGES {
            self.ready.push(page);
        } else {
            memory::discard(page);
            self.discarded.push(page);
        }
    }

    fn take_fresh(&mut self) -> Page {
        if self.n_fresh == 0 {
            self.slabs.push(memory::allocate());
            self.n_fresh = SLAB_PAGES;
        }
        self.n_fresh -= 1;
        let slab = self.slabs.last().expect("a slab was just mapped");
        // SAFETY: the slab spans SLAB_PAGES pages.
        unsafe { slab.add((SLAB_PAGES - 1 - self.n_fresh) * PAGE_BYTES) }
    }

    /// Bytes of pages in use.
    pub fn used_bytes(&self) -> usize {
        self.n_used * PAGE_BYTES
    }

    fn release_slabs(&mut self) {
        self.ready = Vec::new();
        self.discarded = Vec::new();
        self.n_fresh = 0;
        for slab in std::mem::take(&mut self.slabs) {
            memory::free(slab);
        }
    }
}

impl Drop for PagePool {
    fn drop(&mut self) {
        self.release_slabs();
    }
}

#[cfg(unix)]
mod memory {
    use super::{Page, PAGE_BYTES, SLAB_BYTES};
    use std::alloc::{handle_alloc_error, Layout};

    /// Maps a slab aligned to its own size, so that the kernel may back it with one huge page.
    pub fn allocate() -> Page {
        // SAFETY: a fresh private mapping of twice the size; the unaligned ends are unmapped again.
        unsafe {
            let mapped = libc::mmap(
                std::ptr::null_mut(),
                2 * SLAB_BYTES,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            );
            if mapped == libc::MAP_FAILED {
                handle_alloc_error(Layout::from_size_align_unchecked(SLAB_BYTES, PAGE_BYTES));
            }
            let mapped = mapped.cast::<u8>();
            let before = mapped.align_offset(SLAB_BYTES);
            let slab = mapped.add(before);
            if before > 0 {
                libc::munmap(mapped.cast(), before);
            }
            libc::munmap(slab.add(SLAB_BYTES).cast(), SLAB_BYTES - before);
            #[cfg(target_os = "linux")]
            libc::madvise(slab.cast(), SLAB_BYTES, libc::MADV_HUGEPAGE);
            Page::new_unchecked(slab)
        }
    }

    /// Gives the page's memory back; its address stays reserved.
    pub fn discard(page: Page) {
        // SAFETY: the page lies in a mapping of this pool and nobody reads it any more.
        unsafe {
            libc::madvise(page.as_ptr().cast(), PAGE_BYTES, libc::MADV_DONTNEED);
        }
    }

    pub fn free(slab: Page) {
        // SAFETY: the slab was mapped by `allocate` with this size.
        unsafe {
            libc::munmap(slab.as_ptr().cast(), SLAB_BYTES);
        }
    }
}

#[cfg(not(unix))]
mod memory {
    use super::{Page, PAGE_BYTES, SLAB_BYTES};
    use std::alloc::{alloc, dealloc, handle_alloc_error, Layout};

    fn layout() -> Layout {
        Layout::from_size_align(SLAB_BYTES, PAGE_BYTES).expect("a valid layout")
    }

    pub fn allocate() -> Page {
        // SAFETY: the layout is not of size zero.
        Page::new(unsafe { alloc(layout()) }).unwrap_or_else(|| handle_alloc_error(layout()))
    }

    pub fn discard(_page: Page) {}

    pub fn free(slab: Page) {
        // SAFETY: the slab was allocated by `allocate` with this layout.
        unsafe { dealloc(slab.as_ptr(), layout()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_distinct_and_counted() {
        let mut pool = PagePool::default();
        let mut pages: Vec<Page> = (0..2 * SLAB_PAGES).map(|_| pool.take()).collect();
        assert_eq!(pool.used_bytes(), 2 * SLAB_BYTES);
        for (i, page) in pages.iter().enumerate() {
            // SAFETY: the page is ours.
            unsafe { page.as_ptr().write_bytes(i as u8, PAGE_BYTES) };
        }
        for (i, page) in pages.iter().enumerate() {
            // SAFETY: as above.
            assert_eq!(unsafe { *page.as_ptr().add(PAGE_BYTES - 1) }, i as u8);
        }
        pages.drain(..).for_each(|page| pool.give_back(page));
        assert_eq!(pool.used_bytes(), 0);
        assert!(pool.slabs.is_empty());
    }
}
