/* The simulated card. One table; the environment chooses a row and the amounts.
 *
 *   DRY_CC=75|80|86|89|90|120   compute capability (default 89)
 *   DRY_NAME=TEXT               name (default: of the row)
 *   DRY_GIB=NUMBER              memory of each device (default 22)
 *   DRY_DEVICES=NUMBER          devices (default 1)
 *   DRY_COPY=1 DRY_TRACE=1 DRY_STRICT=1
 */
#include "dry.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Sources: the CUDA programming guide's table of technical specifications for threads, blocks and shared memory;
 * NVIDIA's data sheets for multiprocessors, L2 and bus. */
static const struct card cards[] = {
    {75, "Tesla T4", 40, 1024, 16, 64, 4096, 256},
    {80, "NVIDIA A100-SXM4-40GB", 108, 2048, 32, 164, 40960, 5120},
    {86, "NVIDIA GeForce RTX 3090", 82, 1536, 16, 100, 6144, 384},
    {89, "NVIDIA L4", 58, 1536, 24, 100, 49152, 192},
    {90, "NVIDIA H100 80GB HBM3", 132, 2048, 32, 228, 51200, 5120},
    {120, "NVIDIA GeForce RTX 5090", 170, 1536, 24, 100, 98304, 512},
};

static struct card chosen;
static size_t total_bytes;
static int devices;
static bool copies, traces, strict;

static bool is_on(const char *name) {
    const char *value = getenv(name);
    return value && *value && strcmp(value, "0") != 0;
}

static double number(const char *name, double otherwise, double least, double most) {
    const char *text = getenv(name);
    if (!text || !*text)
        return otherwise;
    char *end;
    double value = strtod(text, &end);
    if (*end || value < least || value > most) {
        fprintf(stderr, "dry_gpu: %s=%s: expected a number from %g to %g\n", name, text, least, most);
        exit(2);
    }
    return value;
}

__attribute__((constructor)) static void read_environment(void) {
    int capability = (int)number("DRY_CC", 89, 0, 999);
    for (size_t i = 0; i < sizeof cards / sizeof *cards; i++)
        if (cards[i].capability == capability)
            chosen = cards[i];
    if (!chosen.name) {
        fprintf(stderr, "dry_gpu: DRY_CC=%d: no such card. Use 75, 80, 86, 89, 90 or 120\n", capability);
        exit(2);
    }
    const char *name = getenv("DRY_NAME");
    if (name && *name)
        chosen.name = name;
    total_bytes = (size_t)(number("DRY_GIB", 22, 0.01, 1024) * (1 << 30));
    devices = (int)number("DRY_DEVICES", 1, 1, MAX_DEVICES);
    copies = is_on("DRY_COPY"), traces = is_on("DRY_TRACE"), strict = is_on("DRY_STRICT");
}

const struct card *dry_card(void) { return &chosen; }
size_t dry_total_bytes(void) { return total_bytes; }
int dry_devices(void) { return devices; }
bool dry_copies(void) { return copies; }
bool dry_traces(void) { return traces; }
bool dry_strict(void) { return strict; }

int dry_visible_devices(void) {
    const char *visible = getenv("CUDA_VISIBLE_DEVICES"); /* indices; the first that is none ends the list, as with CUDA */
    if (!visible)
        return devices;
    int found = 0;
    for (char *end; found < devices; visible = end + 1, found++) {
        long index = strtol(visible, &end, 10);
        if (end == visible || index < 0 || index >= devices)
            return found;
        if (*end != ',')
            return found + 1;
    }
    return found;
}
