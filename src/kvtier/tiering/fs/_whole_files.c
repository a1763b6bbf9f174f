/* Publishing and reading some whole files with one call, the interpreter's lock released once for all of them.
 *
 * It decides nothing: block_file.py says when and where, and does the same with the calls of Python's os module where
 * this could not be compiled. Five calls of the system move a small block in less time than the interpreter needs to
 * take its lock back after each of them, from an engine that is computing meanwhile. A file that fails costs itself only.
 *
 * Only Python's stable interface of 3.11 is used, so one compiled module serves later versions too.
 */

#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#define MAX_BUFFERS 8
#define PRIVATE_MODE 0600

/* No number of the system's: it moved nothing more and called that no error. */
#define STOPPED (-1)

/* A file's buffers, kept alive by their views. */
typedef struct {
    int num_views;
    Py_buffer views[MAX_BUFFERS];
    struct iovec iov[MAX_BUFFERS];
    off_t num_bytes;
} Buffers;

typedef ssize_t (*Move)(int fd, const struct iovec *iov, int num_iov, off_t offset);

static void release_buffers(Buffers *buffers)
{
    while (buffers->num_views > 0)
        PyBuffer_Release(&buffers->views[--buffers->num_views]);
}

static int add_buffer(Buffers *buffers, PyObject *buffer, int view_flags)
{
    Py_buffer *view = &buffers->views[buffers->num_views];
    if (PyObject_GetBuffer(buffer, view, view_flags) < 0)
        return -1;
    buffers->iov[buffers->num_views].iov_base = view->buf;
    buffers->iov[buffers->num_views].iov_len = (size_t)view->len;
    buffers->num_bytes += view->len;
    buffers->num_views++;
    return 0;
}

/* Takes a view of each buffer in a sequence; on failure an exception is set and nothing is held. */
static int take_buffers(Buffers *buffers, PyObject *sequence, int view_flags)
{
    buffers->num_views = 0;
    buffers->num_bytes = 0;
    Py_ssize_t num_buffers = PySequence_Size(sequence);
    if (num_buffers < 0)
        return -1;
    if (num_buffers > MAX_BUFFERS) {
        PyErr_Format(PyExc_ValueError, "a file has at most %d buffers, not %zd", MAX_BUFFERS, num_buffers);
        return -1;
    }
    for (Py_ssize_t i = 0; i < num_buffers; i++) {
        PyObject *buffer = PySequence_GetItem(sequence, i);
        int failed = buffer == NULL || add_buffer(buffers, buffer, view_flags) < 0;
        Py_XDECREF(buffer);
        if (failed) {
            release_buffers(buffers);
            return -1;
        }
    }
    return 0;
}

/* Moves every buffer, in one call unless the system stops early. Returns 0 or what went wrong. */
static int move_all(Move move, int fd, Buffers *buffers)
{
    struct iovec *iov = buffers->iov;
    int num_left = buffers->num_views;
    off_t offset = 0;
    while (offset < buffers->num_bytes) {
        ssize_t moved = move(fd, iov, num_left, offset);
        if (moved < 0 && errno == EINTR)
            continue;
        if (moved <= 0)
            return moved < 0 ? errno : STOPPED;
        offset += moved;
        size_t rest = (size_t)moved;
        while (num_left > 0 && rest >= iov->iov_len) {
            rest -= iov->iov_len;
            iov++;
            num_left--;
        }
        if (num_left > 0) {
            iov->iov_base = (char *)iov->iov_base + rest;
            iov->iov_len -= rest;
        }
    }
    return 0;
}

/* An absolute path to what /proc says of the file follows that link; the open file itself needs a capability. */
static int link_open_file(int fd, const char *path)
{
    char proc_path[32];
    snprintf(proc_path, sizeof proc_path, "/proc/self/fd/%d", fd);
    return linkat(AT_FDCWD, proc_path, AT_FDCWD, path, AT_SYMLINK_FOLLOW) < 0 ? errno : 0;
}

static int open_file(const char *path, int flags, mode_t mode)
{
    int fd;
    do
        fd = open(path, flags | O_CLOEXEC, mode);
    while (fd < 0 && errno == EINTR);
    return fd;
}

static void set_mode(int fd, mode_t mode)
{
    int failed;
    do
        failed = fchmod(fd, mode);
    while (failed < 0 && errno == EINTR);
}

/* Some file systems tell only now that they could not keep what was written. */
static int close_written(int fd)
{
    return close(fd) < 0 && errno != EINTR ? errno : 0;
}

/* Sets what the file is; an error when that is a pipe, a socket, a device or a folder. */
static int require_regular(int fd, struct stat *status)
{
    if (fstat(fd, status) < 0)
        return errno;
    return S_ISREG(status->st_mode) ? 0 : EINVAL;
}

static int publish_unnamed(const char *folder, const char *path, int flags, mode_t mode, Buffers *buffers)
{
    int fd = open_file(folder, O_RDWR | O_TMPFILE | O_NOFOLLOW | flags, mode);
    if (fd < 0)
        return errno;
    /* What a umask took away; a file system without modes needs none, so an error of it is none of the block's. */
    if (mode != PRIVATE_MODE)
        set_mode(fd, mode);
    int error = move_all(pwritev, fd, buffers);
    if (error == 0)
        error = link_open_file(fd, path);
    if (error != 0) {
        (void)close(fd);
        return error;
    }
    error = close_written(fd);
    if (error != 0)
        (void)unlink(path);
    return error;
}

/* Where this fails the file ``recycled`` still has its name. Nothing is written into it while there is no folder for the
 * block: that is made, and this tried again. A link does not take a name that is taken; a rename would. */
static int publish_over(const char *folder, const char *recycled, const char *path, int flags, Buffers *buffers)
{
    if (access(folder, F_OK) < 0)
        return errno;
    int fd = open_file(recycled, O_RDWR | O_NOFOLLOW | O_NONBLOCK | flags, 0);
    struct stat status;
    int error = fd < 0 ? errno : require_regular(fd, &status);
    if (error == 0)
        error = move_all(pwritev, fd, buffers);
    if (fd >= 0) {
        int error_of_close = close_written(fd);
        error = error == 0 ? error_of_close : error;
    }
    if (error == 0 && link(recycled, path) < 0)
        error = errno;
    if (error == 0)
        (void)unlink(recycled);
    return error;
}

static double modified_s(const struct stat *status)
{
    return (double)status->st_mtim.tv_sec + 1e-9 * (double)status->st_mtim.tv_nsec;
}

/* What closing says of a file that was only read is of no use: its bytes are there. Nor is it a fault of the block's when
 * the time cannot be set: another user's file, or a disk that takes no change. */
static int read_into(const char *path, int flags, double touch_before_s, Buffers *buffers, struct stat *status)
{
    /* Without O_NONBLOCK a pipe under a block's name would keep this thread until another process writes to it. */
    int fd = open_file(path, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | flags, 0);
    if (fd < 0)
        return errno;
    int error = require_regular(fd, status);
    if (error == 0 && status->st_size >= buffers->num_bytes) {
        error = move_all(preadv, fd, buffers);
        if (error == 0 && modified_s(status) < touch_before_s)
            (void)futimens(fd, NULL);
    }
    (void)close(fd);
    return error;
}

/* A file that is published or read, what is held for it, and what came of it: 0 or what went wrong. */
typedef struct {
    PyObject *encoded_folder, *encoded_path, *encoded_recycled;
    const char *folder, *path, *recycled;
    Buffers buffers;
    struct stat status;
    int error;
} File;

/* Files that are moved with one call, in an array of their own. */
typedef struct {
    Py_ssize_t num_files;
    File *files;
} Batch;

/* Takes what is needed of a tuple; on failure an exception is set, and what was taken is in ``file``. */
typedef int (*Take)(File *file, PyObject *item);

static void release_batch(Batch *batch)
{
    for (Py_ssize_t i = 0; i < batch->num_files; i++) {
        File *file = &batch->files[i];
        release_buffers(&file->buffers);
        Py_XDECREF(file->encoded_folder);
        Py_XDECREF(file->encoded_path);
        Py_XDECREF(file->encoded_recycled);
    }
    PyMem_Free(batch->files);
}

/* Takes what is needed of each item of a sequence; on failure an exception is set and nothing is held. */
static int take_batch(Batch *batch, PyObject *items, Take take)
{
    batch->num_files = PySequence_Size(items);
    if (batch->num_files < 0)
        return -1;
    batch->files = PyMem_Calloc((size_t)batch->num_files, sizeof *batch->files);
    int failed = batch->files == NULL;
    if (failed)
        PyErr_NoMemory();
    for (Py_ssize_t i = 0; i < batch->num_files && !failed; i++) {
        PyObject *item = PySequence_GetItem(items, i);
        if (item != NULL && !PyTuple_Check(item))
            PyErr_SetString(PyExc_TypeError, "a file is described by a tuple");
        failed = item == NULL || !PyTuple_Check(item) || take(&batch->files[i], item) < 0;
        Py_XDECREF(item);
    }
    if (failed && batch->files != NULL)
        release_batch(batch);
    return failed ? -1 : 0;
}

/* Sets a path as the system wants it, without a zero in it, and the object that holds it; on failure an exception is set. */
static int take_path(const char **characters, PyObject **encoded, PyObject *path)
{
    *encoded = PyUnicode_EncodeFSDefault(path);
    return *encoded == NULL || PyBytes_AsStringAndSize(*encoded, (char **)characters, NULL) < 0 ? -1 : 0;
}

/* Sets the folder of a path: what stands before the last slash. */
static int take_folder(const char **folder, PyObject **encoded, const char *path)
{
    const char *slash = strrchr(path, '/');
    *encoded = slash == NULL ? PyBytes_FromString(".") : PyBytes_FromStringAndSize(path, slash - path);
    return *encoded == NULL || PyBytes_AsStringAndSize(*encoded, (char **)folder, NULL) < 0 ? -1 : 0;
}

static int take_new_file(File *file, PyObject *item)
{
    PyObject *path, *recycled, *buffers;
    const char *format = "UOO;a new file is a path, buffers and a recycled file or None";
    if (!PyArg_ParseTuple(item, format, &path, &buffers, &recycled))
        return -1;
    if (take_path(&file->path, &file->encoded_path, path) < 0)
        return -1;
    if (take_folder(&file->folder, &file->encoded_folder, file->path) < 0)
        return -1;
    if (recycled != Py_None && take_path(&file->recycled, &file->encoded_recycled, recycled) < 0)
        return -1;
    return take_buffers(&file->buffers, buffers, PyBUF_SIMPLE);
}

static int take_old_file(File *file, PyObject *item)
{
    PyObject *path, *buffers;
    if (!PyArg_ParseTuple(item, "UO;a file is a path and buffers", &path, &buffers))
        return -1;
    if (take_path(&file->path, &file->encoded_path, path) < 0)
        return -1;
    return take_buffers(&file->buffers, buffers, PyBUF_WRITABLE);
}

static int publish_file(File *file, int flags, mode_t mode)
{
    if (file->recycled != NULL)
        return publish_over(file->folder, file->recycled, file->path, flags, &file->buffers);
    return publish_unnamed(file->folder, file->path, flags, mode, &file->buffers);
}

static PyObject *describe_error(const File *file)
{
    return PyLong_FromLong(file->error);
}

static PyObject *describe_status(const File *file)
{
    if (file->error != 0)
        return describe_error(file);
    const struct stat *status = &file->status;
    return Py_BuildValue("LKKd", (long long)status->st_size, (unsigned long long)status->st_dev,
                         (unsigned long long)status->st_ino, modified_s(status));
}

static PyObject *describe_batch(const Batch *batch, PyObject *(*describe)(const File *))
{
    PyObject *answers = PyList_New(batch->num_files);
    for (Py_ssize_t i = 0; answers != NULL && i < batch->num_files; i++) {
        PyObject *answer = describe(&batch->files[i]);
        if (answer == NULL || PyList_SetItem(answers, i, answer) < 0)
            Py_CLEAR(answers);
    }
    return answers;
}

static PyObject *publish(PyObject *module, PyObject *args)
{
    PyObject *items;
    int flags, mode;
    Batch batch;
    (void)module;
    if (!PyArg_ParseTuple(args, "Oii", &items, &flags, &mode) || take_batch(&batch, items, take_new_file) < 0)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t i = 0; i < batch.num_files; i++)
        batch.files[i].error = publish_file(&batch.files[i], flags, (mode_t)mode);
    Py_END_ALLOW_THREADS
    PyObject *answers = describe_batch(&batch, describe_error);
    release_batch(&batch);
    return answers;
}

static PyObject *read_whole(PyObject *module, PyObject *args)
{
    PyObject *items;
    int flags;
    double touch_before_s;
    Batch batch;
    (void)module;
    if (!PyArg_ParseTuple(args, "Oid", &items, &flags, &touch_before_s) || take_batch(&batch, items, take_old_file) < 0)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t i = 0; i < batch.num_files; i++) {
        File *file = &batch.files[i];
        file->error = read_into(file->path, flags, touch_before_s, &file->buffers, &file->status);
    }
    Py_END_ALLOW_THREADS
    PyObject *answers = describe_batch(&batch, describe_status);
    release_batch(&batch);
    return answers;
}

static PyMethodDef methods[] = {
    {"publish", publish, METH_VARARGS, "Write files under names that are not taken; return what went wrong with each."},
    {"read", read_whole, METH_VARARGS, "Fill buffers from files unless they are shorter; return what each is."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "_whole_files",
    .m_doc = "Publishing and reading some whole files with one call.",
    .m_size = 0,
    .m_methods = methods,
};

PyMODINIT_FUNC PyInit__whole_files(void)
{
    return PyModule_Create(&definition);
}
