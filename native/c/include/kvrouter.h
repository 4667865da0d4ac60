/*
 * kvrouter: publish to a worker which KV blocks your engine holds.
 *
 * An engine in any language opens a publisher at its worker's door and reports what it stores and drops. Token ids
 * are hashed here, once; routers learn of them through the worker, whatever event plane it uses.
 *
 * - No call but kvr_flush and kvr_close waits. A thread in the engine's process sends. While there is no connection, or
 *   when more is reported than can be sent, the rank is sent again whole, from a mirror of what the engine holds, so
 *   that routers never keep a block that may be gone.
 * - Any thread may call, except that nothing may be called during or after kvr_close of the same publisher. Calls
 *   about one dp_rank must be made in the order in which they happened.
 * - Open the publisher after the last fork: its thread does not live on in a child.
 * - Pointers are read during the call and not kept. Strings are UTF-8 and end with NUL; NULL is the empty string.
 */
#ifndef KVROUTER_H
#define KVROUTER_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* What a call returns; kvr_message says it in words. */
enum {
    KVR_OK = 0,
    KVR_INVALID = -1,        /* an argument cannot be what it is; nothing was done */
    KVR_UNKNOWN_PARENT = -2, /* the parent is not held, so nobody could ever find the blocks; nothing was done */
    KVR_FULL = -3,           /* held_blocks_max is reached; these blocks are not published */
    KVR_TIMEOUT = -4,        /* kvr_flush: the worker has not taken everything yet */
    KVR_BUG = -99            /* a mistake of this library's */
};

/* Where a block's bytes are. Only KVR_GPU counts as overlap; routers count the others and do not weigh them. */
enum { KVR_GPU = 0, KVR_CPU = 1, KVR_DISK = 2, KVR_EXTERNAL = 3 };

typedef struct kvr_publisher kvr_publisher;

typedef struct kvr_config {
    size_t struct_bytes;     /* sizeof(kvr_config) */
    const char *address;     /* the worker's door: unix:/path or tcp://host:port */
    const char *token;       /* what the door asks for */
    uint32_t block_size;     /* tokens of a block; must be the worker's */
    uint64_t queue_bytes_max; /* what may wait to be sent; 0: 8 MiB */
    uint64_t held_blocks_max; /* what the mirror may hold, 56 to 112 bytes each; 0: 16 million */
} kvr_config;

#define KVR_CONFIG_INIT { sizeof(kvr_config), NULL, NULL, 0, 0, 0 }

typedef struct kvr_load_report {
    uint64_t active_blocks;
    uint64_t total_blocks;
    uint64_t active_prefill_tokens;
    uint64_t running_requests;
    uint64_t waiting_requests;
} kvr_load_report;

typedef struct kvr_state {
    size_t struct_bytes;      /* sizeof(kvr_state), set by the caller */
    uint32_t connected;       /* 1 while the worker listens */
    uint64_t queued_bytes;
    uint64_t queued_events;
    uint64_t held_blocks;     /* over all ranks and media */
    uint64_t connections;     /* how often one was made */
    uint64_t replacements;    /* how often a rank was sent again whole */
    uint64_t overflows;       /* how often the queue was full */
    uint64_t dropped_events;  /* dropped from a full queue; their ranks were sent again whole */
    uint64_t unknown_parents; /* stores that were refused with KVR_UNKNOWN_PARENT */
    uint64_t unknown_removed; /* removals of blocks that were not held */
    char error[256];          /* why there is no connection; empty when there is one, or none was tried yet */
} kvr_state;

#define KVR_STATE_INIT { sizeof(kvr_state), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, { 0 } }

/* The library's version, as in "0.1.0". */
const char *kvr_version(void);

/* What a returned code means, in words. */
const char *kvr_message(int code);

/*
 * Begin to publish; does not wait for a connection. NULL when the configuration cannot be run with: error then
 * says why, in at most error_bytes bytes, its NUL included.
 */
kvr_publisher *kvr_publisher_open(const kvr_config *config, char *error, size_t error_bytes);

/*
 * Consecutive blocks were stored: engine_hashes[i] is your name for the i-th block of token_ids. n_tokens must be
 * n_blocks times the block size. parent is your name for the block before the first one, NULL where a sequence
 * begins. Storing a block n times takes n removals.
 */
int kvr_stored(kvr_publisher *publisher, uint32_t dp_rank, const uint32_t *token_ids, size_t n_tokens,
               const uint64_t *engine_hashes, size_t n_blocks, const uint64_t *parent, const char *lora_name,
               const char *cache_namespace, int medium);

/* Blocks left a medium. What follows a removed block counts again once it is stored again. */
int kvr_removed(kvr_publisher *publisher, uint32_t dp_rank, const uint64_t *engine_hashes, size_t n_blocks,
                int medium);

/* Every block of the rank is gone, in every medium. */
int kvr_cleared(kvr_publisher *publisher, uint32_t dp_rank);

/* How busy the rank is; only the latest report is kept. */
int kvr_load(kvr_publisher *publisher, uint32_t dp_rank, const kvr_load_report *report);

/* Wait, for at most timeout_ms, until the worker has taken everything that was reported before. */
int kvr_flush(kvr_publisher *publisher, uint32_t timeout_ms);

/* Fill in state; its struct_bytes says that it is this one. */
int kvr_status(kvr_publisher *publisher, kvr_state *state);

/*
 * End: the worker forgets the blocks at once, as it does when the engine dies. Waits for the thread: at once while
 * connected, at most a few seconds while it connects. NULL is allowed.
 */
void kvr_close(kvr_publisher *publisher);

#ifdef __cplusplus
}
#endif

#endif
