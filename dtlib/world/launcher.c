/* launcher PYTHON ARGUMENTS ...: started by mpiexec in place of a rank; the rank itself is forked from the zygote.

   The launcher passes its standard streams and signals to the rank, and exits with the rank's status. The rank reads
   its arguments, environment and folder from this process. If the zygote is missing, does not answer or refuses, this
   process becomes PYTHON ARGUMENTS ... itself. forking.py compiles this file; forked.py is the rank's side. */

#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

enum { REPLY_SECONDS = 40, MOMENT = 5 }; /* seconds: for a zygote that imports; for a rank's status */
enum { FORKED = 1, ENDED = 2 };     /* kinds of messages */
typedef struct { int32_t what, value; } Message;

static volatile pid_t rank;
static volatile sig_atomic_t handed_on;

static void hand_on(int number) {
  int saved = errno;
  handed_on = number;
  kill(rank, number);
  errno = saved;
}

static void wait_at_most(int connection, int seconds) {
  struct timeval limit = {.tv_sec = seconds};
  setsockopt(connection, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
  setsockopt(connection, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
}

/* Connect to this user's zygote in the folder; return the connection, or -1. */
static int connect_to(const char *folder) {
  struct sockaddr_un where = {.sun_family = AF_UNIX};
  struct ucred other;
  socklen_t length = sizeof other;
  if ((size_t)snprintf(where.sun_path, sizeof where.sun_path, "%s/0", folder) >= sizeof where.sun_path) return -1;
  int connection = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  wait_at_most(connection, REPLY_SECONDS);
  if (connect(connection, (struct sockaddr *)&where, sizeof where) == 0 &&
      getsockopt(connection, SOL_SOCKET, SO_PEERCRED, &other, &length) == 0 && other.uid == getuid())
    return connection;
  close(connection);
  return -1;
}

/* Send the standard streams, which tells the rank to run. Sent earlier, they would stay open in the queue of a zygote
   that does not answer. */
static int send_streams(int connection) {
  char letter = 'g';
  struct iovec data = {&letter, 1};
  union { char room[CMSG_SPACE(3 * sizeof(int))]; struct cmsghdr align; } control = {{0}};
  struct msghdr message = {.msg_iov = &data, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
  struct cmsghdr *files = CMSG_FIRSTHDR(&message);
  files->cmsg_level = SOL_SOCKET, files->cmsg_type = SCM_RIGHTS, files->cmsg_len = CMSG_LEN(3 * sizeof(int));
  memcpy(CMSG_DATA(files), (int[]){0, 1, 2}, 3 * sizeof(int));
  return sendmsg(connection, &message, MSG_NOSIGNAL) == 1;
}

static int hear(int connection, Message *said) { return recv(connection, said, sizeof *said, MSG_WAITALL) == sizeof *said; }

/* Wait for the rank's exit status; return -1 if the zygote has ended. */
static int status_of_rank(int connection, int process) {
  Message said;
  struct pollfd either[] = {{connection, POLLIN, 0}, {process, POLLIN, 0}};
  while (poll(either, 2, -1) < 0 && errno == EINTR) {}
  wait_at_most(connection, MOMENT);
  return hear(connection, &said) && said.what == ENDED ? said.value : -1;
}

int main(int count, char **arguments) {
  const char *folder = getenv("DTLIB_ZYGOTE");
  Message said;
  if (count < 2) return 2;
  int connection = folder ? connect_to(folder) : -1;
  if (connection < 0 || !hear(connection, &said) || said.what != FORKED) goto plain;

  rank = said.value;
  int numbers[] = {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2, SIGTSTP, SIGCONT};
  struct sigaction act = {.sa_handler = hand_on, .sa_flags = SA_RESTART};
  for (unsigned i = 0; i < sizeof numbers / sizeof *numbers; i++) sigaction(numbers[i], &act, NULL);
  char name[16];
  snprintf(name, sizeof name, "rank is %d", rank);
  prctl(PR_SET_NAME, name);
  send_streams(connection); /* if this fails, the rank ends, and the zygote sends its status below */

  int process = syscall(SYS_pidfd_open, rank, 0), status = status_of_rank(connection, process);
  if (status == -1) {
    fprintf(stderr, "The process that ranks are forked from has ended, and with it process %d.\n", rank);
    syscall(SYS_pidfd_send_signal, process, SIGKILL, NULL, 0);
    return 1;
  }
  if (!WIFSIGNALED(status)) return WEXITSTATUS(status);
  int number = WTERMSIG(status);
  if (number != handed_on) fprintf(stderr, "Process %d stands for process %d, which signal %d has ended.\n", getpid(), rank, number);
  setrlimit(RLIMIT_CORE, &(struct rlimit){0, 0});
  signal(number, SIG_DFL);
  kill(getpid(), number);
  return 128 + number;

plain:
  if (connection >= 0) close(connection);
  execvp(arguments[1], arguments + 1);
  perror(arguments[1]);
  return 127;
}
