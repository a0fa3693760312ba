/* Which memory an address belongs to: one array sorted by address, searched by halves. */
#include "dry.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

static struct range *ranges;
static size_t count, room;
static pthread_rwlock_t lock = PTHREAD_RWLOCK_INITIALIZER;

/* The number of ranges that start at or before an address. */
static size_t upto(const char *address) {
    size_t low = 0, high = count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (ranges[middle].start <= address)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* False where it would overlap one that is there. */
bool dry_range_add(void *start, size_t bytes, enum kind kind, int device) {
    pthread_rwlock_wrlock(&lock);
    size_t at = upto(start);
    bool overlaps = (at > 0 && ranges[at - 1].start + ranges[at - 1].bytes > (char *)start) ||
                    (at < count && (char *)start + bytes > ranges[at].start);
    if (!overlaps) {
        if (count == room) {
            room = room ? 2 * room : 1024;
            ranges = realloc(ranges, room * sizeof *ranges);
            if (!ranges)
                abort();
        }
        memmove(ranges + at + 1, ranges + at, (count - at) * sizeof *ranges);
        ranges[at] = (struct range){start, bytes, kind, device};
        count++;
    }
    pthread_rwlock_unlock(&lock);
    return !overlaps;
}

/* Removes the range that starts at an address; false where none does. */
bool dry_range_take(void *start, struct range *taken) {
    pthread_rwlock_wrlock(&lock);
    size_t at = upto(start);
    bool found = at > 0 && ranges[at - 1].start == (char *)start;
    if (found) {
        *taken = ranges[at - 1];
        memmove(ranges + at - 1, ranges + at, (count - at) * sizeof *ranges);
        count--;
    }
    pthread_rwlock_unlock(&lock);
    return found;
}

/* The range that an address lies in; false where it is ordinary host memory. */
bool dry_range_at(const void *address, struct range *found) {
    pthread_rwlock_rdlock(&lock);
    size_t at = upto(address);
    bool inside = at > 0 && (const char *)address < ranges[at - 1].start + ranges[at - 1].bytes;
    if (inside)
        *found = ranges[at - 1];
    pthread_rwlock_unlock(&lock);
    return inside;
}
