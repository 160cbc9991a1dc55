/* A stand-in for libhccl.so and libascendcl.so: the same functions, over shared memory of this host.
 *
 * It keeps to what a caller has to get right. Work given to a stream is done when the stream is
 * synchronised, not before. A thread must have taken a device. Allocated memory is full of rubbish.
 * Ranks that make different calls get an error, where the real library would hang or mix bytes up.
 *
 * The root info names a descriptor of rank 0's process, so there is no file to leave behind, not
 * even after kill -9.
 *
 * FAKEHCCL_FAULT="function:n:what" spoils the n-th call of a function of this process; what is
 * "error=<code>", "hang" (for FAKEHCCL_SECONDS), or "die". The function "execute" stands for the
 * n-th piece of work that a stream does. Compiled with -DOLD, it lacks what old libraries lack.
 * FAKEHCCL_SECONDS (30): how long a rank waits for others.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/futex.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { OK = 0, E_PARA = 1, E_PTR = 2, E_MEMORY = 3, E_TIMEOUT = 9 };
enum { ACL_REPEATED = 100002, ACL_NO_CONTEXT = 107002, ACL_PARAM = 107000, ACL_TIMEOUT = 507046 };
enum { MAX_RANKS = 8, CHUNK = 1 << 20, INFO = 4108 };
enum { BROADCAST = 1, ALL_REDUCE = 2, COPY = 3 };

typedef struct { char internal[INFO]; } RootInfo;
typedef struct { int32_t kind, dtype, op; uint64_t count; } Call;
typedef struct {
    _Atomic uint32_t ranks, turn;
    _Atomic uint64_t arrived[MAX_RANKS];
    Call calls[MAX_RANKS];
    char data[CHUNK];
} Shared;
typedef struct { Shared *shared; uint32_t ranks, rank; uint64_t step; } Comm;
typedef struct Work {
    Call call; Comm *comm; void *to; const void *from; struct Work *next;
} Work;
typedef struct { Work *first, **last; } Stream;

static const int SIZES[] = {1, 2, 4, 2, 4, 8, 8, 1, 2, 4, 8, 2};
static __thread int device = -1;
static _Atomic int initialised, live;

/* Things allocated and not freed: streams, communicators, memory. For tests. */
int fakehccl_live(void) { return live; }

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

static double patience(void) {
    const char *set = getenv("FAKEHCCL_SECONDS");
    return set ? atof(set) : 30.0;
}

static int fault(const char *function) {
    static _Atomic int calls;
    const char *set = getenv("FAKEHCCL_FAULT");
    size_t length = strlen(function);
    if (!set || strncmp(set, function, length) || set[length] != ':') return OK;
    char *what;
    long wanted = strtol(set + length + 1, &what, 10);
    if (atomic_fetch_add(&calls, 1) + 1 != wanted) return OK;
    if (!strcmp(what, ":die")) kill(getpid(), SIGKILL);
    if (!strcmp(what, ":hang")) usleep((useconds_t)(1e6 * patience()));
    return strncmp(what, ":error=", 7) ? OK : atoi(what + 7);
}
#define FAULT(function) do { int f = fault(function); if (f) return f; } while (0)
#define NEEDS_DEVICE() do { if (device < 0) return ACL_NO_CONTEXT; } while (0)

/* Wait until every rank is at this step. */
static int meet(Comm *c, double until) {
    Shared *s = c->shared;
    uint64_t step = ++c->step;
    atomic_store(&s->arrived[c->rank], step);
    atomic_fetch_add(&s->turn, 1);
    syscall(SYS_futex, &s->turn, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
    for (uint32_t r = 0; r < c->ranks; r++)
        for (;;) {
            uint32_t turn = atomic_load(&s->turn);
            double left = until - now();
            if (atomic_load(&s->arrived[r]) >= step) break;
            if (left <= 0) return E_TIMEOUT;
            struct timespec t = {(time_t)left, (long)(1e9 * (left - (time_t)left))};
            syscall(SYS_futex, &s->turn, FUTEX_WAIT, turn, &t, NULL, 0);
        }
    return OK;
}
#define MEET() do { int e = meet(c, until); if (e) return e; } while (0)

static int same_calls(Comm *c, const Call *mine, double until) {
    Shared *s = c->shared;
    int differ = 0;
    s->calls[c->rank] = *mine;
    MEET();
    for (uint32_t r = 0; r < c->ranks; r++) {
        const Call *other = &s->calls[r];
        differ |= other->kind != mine->kind || other->dtype != mine->dtype
               || other->op != mine->op || other->count != mine->count;
    }
    MEET();
    return differ ? E_PARA : OK;
}

static int do_broadcast(Comm *c, const Call *call, char *at, double until) {
    uint64_t total = call->count * SIZES[call->dtype];
    int root = call->op;
    for (uint64_t done = 0; done < total;) {
        uint64_t part = total - done < CHUNK ? total - done : CHUNK;
        if ((int)c->rank == root) memcpy(c->shared->data, at + done, part);
        MEET();
        if ((int)c->rank != root) memcpy(at + done, c->shared->data, part);
        MEET();
        done += part;
    }
    return OK;
}

static int do_all_reduce(Comm *c, const Call *call, char *to, const char *from, double until) {
    uint64_t bytes = call->count * SIZES[call->dtype];
    if (bytes * c->ranks > CHUNK) return E_MEMORY;
    memcpy(c->shared->data + c->rank * bytes, from, bytes);
    MEET();
    for (uint64_t k = 0; k < call->count; k++) {
        float sum = 0;
        int32_t largest = INT32_MIN;
        for (uint32_t r = 0; r < c->ranks; r++) {
            const char *theirs = c->shared->data + r * bytes;
            sum += ((const float *)theirs)[k];
            int32_t value = ((const int32_t *)theirs)[k];
            if (value > largest) largest = value;
        }
        if (call->dtype == 4) ((float *)to)[k] = sum;
        else ((int32_t *)to)[k] = largest;
    }
    MEET();
    return OK;
}

static int execute(Work *w, double until) {
    FAULT("execute");
    if (w->call.kind == COPY) {
        memmove(w->to, w->from, w->call.count);
        return OK;
    }
    int e = same_calls(w->comm, &w->call, until);
    if (e) return e;
    if (w->call.kind == BROADCAST) return do_broadcast(w->comm, &w->call, w->to, until);
    return do_all_reduce(w->comm, &w->call, w->to, w->from, until);
}

/* Without a stream, as on the default stream of a device: at once. */
static int give(Stream *s, Work work) {
    if (!s) return execute(&work, now() + patience());
    Work *kept = malloc(sizeof *kept);
    *kept = work;
    kept->next = NULL;
    *s->last = kept;
    s->last = &kept->next;
    return OK;
}

/* --- HCCL --------------------------------------------------------------------------------- */

#ifndef OLD
const char *HcclGetErrorString(int code) {
    switch (code) {
        case OK: return "no error";
        case E_PARA: return "parameter error";
        case E_TIMEOUT: return "timeout";
        default: return "some error of the fake library";
    }
}
#endif

int HcclGetRootInfo(RootInfo *info) {
    FAULT("HcclGetRootInfo");
    NEEDS_DEVICE();
    if (!info) return E_PTR;
    int fd = memfd_create("fakehccl", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, sizeof(Shared))) return E_MEMORY;
    memset(info, 0, sizeof *info);
    snprintf(info->internal, 64, "fakehccl:/proc/%d/fd/%d", getpid(), fd);
    return OK;
}

int HcclCommInitRootInfo(uint32_t ranks, const RootInfo *info, uint32_t rank, void **out) {
    FAULT("HcclCommInitRootInfo");
    NEEDS_DEVICE();
    if (!info || !out) return E_PTR;
    if (strncmp(info->internal, "fakehccl:", 9) || ranks > MAX_RANKS || rank >= ranks) return E_PARA;
    int fd = open(info->internal + 9, O_RDWR | O_CLOEXEC);
    if (fd < 0) return E_PARA;
    Shared *shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (shared == MAP_FAILED) return E_MEMORY;
    uint32_t none = 0;
    if (!atomic_compare_exchange_strong(&shared->ranks, &none, ranks) && none != ranks) return E_PARA;
    Comm *made = calloc(1, sizeof *made);
    *made = (Comm){shared, ranks, rank, 0};
    int e = meet(made, now() + patience());
    if (e) return e;
    *out = made;
    live++;
    return OK;
}

int HcclBroadcast(void *at, uint64_t count, int dtype, uint32_t root, void *comm, void *stream) {
    FAULT("HcclBroadcast");
    NEEDS_DEVICE();
    Comm *c = comm;
    if (!at || !c) return E_PTR;
    if (dtype < 0 || dtype > 11 || root >= c->ranks) return E_PARA;
    if (!count) return OK;
    Call call = {BROADCAST, dtype, (int32_t)root, count};
    return give(stream, (Work){call, c, at, NULL, NULL});
}

int HcclAllReduce(void *send, void *receive, uint64_t count, int dtype, int op, void *comm,
                  void *stream) {
    FAULT("HcclAllReduce");
    NEEDS_DEVICE();
    if (!send || !receive || !comm) return E_PTR;
    /* as much as is needed: sums of float32, largest of int32 */
    if (!((dtype == 4 && op == 0) || (dtype == 2 && op == 2))) return E_PARA;
    Call call = {ALL_REDUCE, dtype, op, count};
    return give(stream, (Work){call, comm, receive, send, NULL});
}

int HcclCommDestroy(void *comm) {
    FAULT("HcclCommDestroy");
    NEEDS_DEVICE();
    Comm *c = comm;
    munmap(c->shared, sizeof *c->shared);
    free(c);
    live--;
    return OK;
}

/* --- AscendCL ----------------------------------------------------------------------------- */

int aclInit(const char *config) {
    (void)config;
    FAULT("aclInit");
    return atomic_exchange(&initialised, 1) ? ACL_REPEATED : OK;
}

#ifndef OLD
const char *aclGetRecentErrMsg(void) { return "the last error of the fake runtime"; }
#endif

int aclrtSetDevice(int32_t number) {
    FAULT("aclrtSetDevice");
    if (!initialised || number < 0 || number > 15) return ACL_PARAM;
    device = number;
    return OK;
}

int aclrtCreateStream(void **out) {
    FAULT("aclrtCreateStream");
    NEEDS_DEVICE();
    Stream *s = malloc(sizeof *s);
    s->first = NULL;
    s->last = &s->first;
    *out = s;
    live++;
    return OK;
}

static int drain(Stream *s, double until) {
    while (s->first) {
        Work *w = s->first;
        int e = execute(w, until);
        if (!(s->first = w->next)) s->last = &s->first;
        free(w);
        if (e) return e;
    }
    return OK;
}

#ifndef OLD
int aclrtSynchronizeStreamWithTimeout(void *stream, int32_t milliseconds) {
    FAULT("aclrtSynchronizeStreamWithTimeout");
    NEEDS_DEVICE();
    if (!stream || milliseconds <= 0) return ACL_PARAM;
    int e = drain(stream, now() + 1e-3 * milliseconds);
    return e == E_TIMEOUT ? ACL_TIMEOUT : e;
}
#endif

int aclrtSynchronizeStream(void *stream) {
    FAULT("aclrtSynchronizeStream");
    NEEDS_DEVICE();
    return stream ? drain(stream, now() + patience()) : ACL_PARAM;
}

int aclrtDestroyStream(void *stream) {
    FAULT("aclrtDestroyStream");
    NEEDS_DEVICE();
    for (Work *w = ((Stream *)stream)->first, *next; w; w = next) {
        next = w->next;
        free(w);
    }
    free(stream);
    live--;
    return OK;
}

int aclrtMalloc(void **out, size_t bytes, int policy) {
    (void)policy;
    FAULT("aclrtMalloc");
    NEEDS_DEVICE();
    if (!bytes) return ACL_PARAM;
    size_t rounded = (bytes + 511) / 512 * 512;
    *out = aligned_alloc(512, rounded);
    if (!*out) return ACL_PARAM;
    memset(*out, 0xA5, rounded);
    live++;
    return OK;
}

int aclrtFree(void *at) {
    FAULT("aclrtFree");
    NEEDS_DEVICE();
    free(at);
    live--;
    return OK;
}

int aclrtMemcpy(void *to, size_t room, const void *from, size_t bytes, int kind) {
    FAULT("aclrtMemcpy");
    NEEDS_DEVICE();
    if (!to || !from || bytes > room || kind < 1 || kind > 3) return ACL_PARAM;
    memcpy(to, from, bytes);
    return OK;
}

int aclrtMemcpyAsync(void *to, size_t room, const void *from, size_t bytes, int kind,
                     void *stream) {
    FAULT("aclrtMemcpyAsync");
    NEEDS_DEVICE();
    if (!to || !from || bytes > room || kind != 3 || !stream) return ACL_PARAM;
    Call call = {COPY, 0, 0, bytes};
    return give(stream, (Work){call, NULL, to, from, NULL});
}
