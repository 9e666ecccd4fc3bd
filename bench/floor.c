/* The floor: what the kernel alone takes for one sandbox. No interpreter, no policy, no filter.
 *
 * One clone3(2) into all namespaces, a tmpfs root with a read-only /usr and a /proc, pivot_root(2), exec of
 * true(1), and its end. Prints the microseconds from before the clone to after the wait. Needs no privilege
 * where user namespaces are allowed. Usage: floor [times]
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/sched.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define NAMESPACES (CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWCGROUP)

static void must(int result, const char *step) {
    if (result < 0) {
        perror(step);
        _exit(80);
    }
}

static void put(const char *path, const char *text) {
    int file = open(path, O_WRONLY | O_CLOEXEC);
    must(file, path);
    must((int)write(file, text, strlen(text)), path);
    close(file);
}

/* /bin, /lib and the like: links into /usr on a merged system, directories elsewhere. */
static void place(const char *name) {
    char link[128], from[64];
    snprintf(from, sizeof from, "/%s", name);
    ssize_t size = readlink(from, link, sizeof link - 1);
    if (size > 0) {
        link[size] = 0;
        must(symlink(link, name), name);
    } else if (access(from, F_OK) == 0) {
        must(mkdir(name, 0755), name);
        must(mount(from, name, NULL, MS_BIND | MS_REC, NULL), name);
    }
}

static void child(const char *uids, const char *gids) {
    put("/proc/self/setgroups", "deny");
    put("/proc/self/uid_map", uids);
    put("/proc/self/gid_map", gids);
    must(mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL), "private mounts");
    must(mount("tmpfs", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, "size=64m,mode=755"), "tmpfs");
    must(chdir("/tmp"), "chdir");
    must(mkdir("usr", 0755), "usr");
    must(mkdir("proc", 0755), "proc");
    place("bin");
    place("lib");
    place("lib64");
    must(mount("/usr", "usr", NULL, MS_BIND | MS_REC, NULL), "bind /usr");
    must(mount(NULL, "usr", NULL, MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NODEV, NULL), "read-only /usr");
    must(mount("proc", "proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL), "proc");
    must((int)syscall(SYS_pivot_root, ".", "."), "pivot_root");
    must(umount2(".", MNT_DETACH), "umount");
    must(chdir("/"), "chdir");
    execl("/usr/bin/true", "true", (char *)NULL);
    perror("exec");
    _exit(81);
}

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1e6 + time.tv_nsec / 1e3;
}

int main(int count, char **words) {
    int times = count > 1 ? atoi(words[1]) : 1;
    char uids[64], gids[64];
    snprintf(uids, sizeof uids, "0 %d 1\n", (int)getuid());
    snprintf(gids, sizeof gids, "0 %d 1\n", (int)getgid());
    for (int turn = 0; turn < times; turn++) {
        struct clone_args arguments;
        memset(&arguments, 0, sizeof arguments);
        arguments.flags = NAMESPACES;
        arguments.exit_signal = SIGCHLD;
        double begun = now();
        pid_t pid = (pid_t)syscall(SYS_clone3, &arguments, sizeof arguments);
        if (pid == 0)
            child(uids, gids);
        must(pid, "clone3");
        int status;
        while (waitpid(pid, &status, 0) < 0 && errno == EINTR)
            ;
        double ended = now();
        if (!WIFEXITED(status) || WEXITSTATUS(status) != 0)
            return 1;
        printf("%.1f\n", ended - begun);
    }
    return 0;
}
