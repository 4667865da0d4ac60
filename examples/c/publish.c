/*
 * An engine in C reports to its worker which KV blocks it holds.
 *
 *     cc -o publish publish.c -I ../../native/c/include -L ../../native/target/release -lkvrouter
 *     KVR_TOKEN=… ./publish unix:/run/worker.sock 16 < token-ids
 *
 * Reads a line of token ids, stores their blocks, and reports them; a second line removes them, a third ends it.
 */
#include <inttypes.h>
#include <kvrouter.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TOKENS_MAX = 8192, WAIT_MS = 500, WAITS_MAX = 60 };

static uint32_t token_ids[TOKENS_MAX];
static uint64_t engine_hashes[TOKENS_MAX];

static size_t read_token_ids(void)
{
    size_t n_tokens = 0;
    char after = ' ';
    while (after != '\n' && n_tokens < TOKENS_MAX) {
        if (scanf("%" SCNu32 "%c", &token_ids[n_tokens], &after) != 2) {
            break;
        }
        n_tokens++;
    }
    return n_tokens;
}

static void wait_for_a_line(void)
{
    int c;
    do {
        c = getchar();
    } while (c != '\n' && c != EOF);
}

/* Wait, only so that what is printed is true: an engine need not. Each reason for no connection is printed once. */
static int wait_until_taken(kvr_publisher *publisher)
{
    char printed[sizeof(((kvr_state *)NULL)->error)] = "";
    int code = KVR_TIMEOUT;
    for (int i = 0; i < WAITS_MAX && code == KVR_TIMEOUT; i++) {
        code = kvr_flush(publisher, WAIT_MS);
        kvr_state state = KVR_STATE_INIT;
        kvr_status(publisher, &state);
        if (code == KVR_TIMEOUT && state.error[0] != '\0' && strcmp(state.error, printed) != 0) {
            strcpy(printed, state.error);
            fprintf(stderr, "waiting: %s\n", printed);
        }
    }
    return code;
}

static int report(kvr_publisher *publisher, const char *what, size_t n_blocks, int code)
{
    if (code == KVR_OK) {
        code = wait_until_taken(publisher);
    }
    if (code != KVR_OK) {
        kvr_state state = KVR_STATE_INIT;
        kvr_status(publisher, &state);
        fprintf(stderr, "%s: %s (%s)\n", what, kvr_message(code), state.error);
        return EXIT_FAILURE;
    }
    printf("%s %zu blocks\n", what, n_blocks);
    fflush(stdout);
    return EXIT_SUCCESS;
}

int main(int argc, char **argv)
{
    if (argc != 3) {
        fprintf(stderr, "usage: %s ADDRESS BLOCK_SIZE\n", argv[0]);
        return EXIT_FAILURE;
    }
    kvr_config config = KVR_CONFIG_INIT;
    config.address = argv[1];
    config.block_size = (uint32_t)strtoul(argv[2], NULL, 10);
    config.token = getenv("KVR_TOKEN");

    char error[256];
    kvr_publisher *publisher = kvr_publisher_open(&config, error, sizeof error);
    if (publisher == NULL) {
        fprintf(stderr, "kvr_publisher_open: %s\n", error);
        return EXIT_FAILURE;
    }

    /* The engine's own names for its blocks: any numbers that differ. */
    size_t n_blocks = read_token_ids() / config.block_size;
    for (size_t i = 0; i < n_blocks; i++) {
        engine_hashes[i] = 1000 + i;
    }
    size_t n_tokens = n_blocks * config.block_size;
    int code = kvr_stored(publisher, 0, token_ids, n_tokens, engine_hashes, n_blocks, NULL, NULL, NULL, KVR_GPU);
    int status = report(publisher, "stored", n_blocks, code);

    if (status == EXIT_SUCCESS) {
        wait_for_a_line();
        code = kvr_removed(publisher, 0, engine_hashes, n_blocks, KVR_GPU);
        status = report(publisher, "removed", n_blocks, code);
    }
    if (status == EXIT_SUCCESS) {
        wait_for_a_line();
    }
    kvr_close(publisher);
    return status;
}
