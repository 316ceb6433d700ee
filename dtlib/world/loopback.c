/* Preloaded into mpiexec: binds its sockets to the loopback interface. mpiexec itself would listen on every interface,
   or, in older Open MPI, on one that other machines reach.

   Ranks on other machines could not connect then, so nothing changes if the command line names hosts.
   loopback.py compiles this file. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <netinet/in.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>

static int names_hosts(void) {
  static char line[65536];
  FILE *file = fopen("/proc/self/cmdline", "r");
  if (!file) return 1;
  size_t length = fread(line, 1, sizeof line - 1, file);
  fclose(file);
  if (length == sizeof line - 1) return 1; /* the line is cut: assume that it names hosts */
  for (char *word = line; word < line + length; word += strlen(word) + 1)
    if (!strcmp(word, "-H") || (word[0] == '-' && (strstr(word, "host") || strstr(word, "machinefile")))) return 1;
  return 0;
}

int bind(int socket, const struct sockaddr *address, socklen_t length) {
  int (*real)(int, const struct sockaddr *, socklen_t) = dlsym(RTLD_NEXT, "bind");
  struct sockaddr_in here;
  struct sockaddr_in6 here6;
  if (address && address->sa_family == AF_INET && length >= sizeof here) {
    memcpy(&here, address, sizeof here);
    if (ntohl(here.sin_addr.s_addr) >> 24 != IN_LOOPBACKNET && !names_hosts()) {
      here.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
      return real(socket, (struct sockaddr *)&here, sizeof here);
    }
  }
  if (address && address->sa_family == AF_INET6 && length >= sizeof here6) {
    memcpy(&here6, address, sizeof here6);
    if (!IN6_IS_ADDR_LOOPBACK(&here6.sin6_addr) && !names_hosts()) {
      here6.sin6_addr = in6addr_loopback;
      return real(socket, (struct sockaddr *)&here6, sizeof here6);
    }
  }
  return real(socket, address, length);
}
