# Monte Carlo pi on MPI ranks: mpiexec -n 4 Rscript pi.R 1e7
library(Rmpi)
library(parallel)  # for nextRNGStream

rank <- mpi.comm.rank(0)  # communicator 0 is the world: all ranks that mpiexec started
size <- mpi.comm.size(0)
points <- as.numeric(c(commandArgs(TRUE), 1e7)[1])

RNGkind("L'Ecuyer-CMRG")  # one long chain of random numbers,
set.seed(1)               # with the same start on all ranks; each jump skips 2^127 of them
for (jump in seq_len(rank)) .Random.seed <- nextRNGStream(.Random.seed)

start <- function(rank) (points * rank) %/% size  # the parentheses matter: %/% binds closer than *
left <- mine <- start(rank + 1) - start(rank)
inside <- 0
while (left > 0) {  # a block at a time: memory stays small
  n <- min(left, 1e5)
  inside <- inside + sum(runif(n)^2 + runif(n)^2 < 1)
  left <- left - n
}
cat(sprintf("rank %d of %d: %.0f of %.0f points inside\n", rank, size, inside, mine))

share <- mpi.allreduce(inside, type = 2, op = "sum", comm = 0) / points  # type 2: double
error <- 4 * sqrt(share * (1 - share) / points)
if (rank == 0) cat(sprintf("pi is about %.6f, standard error %.6f\n", 4 * share, error))
mpi.quit()  # MPI_Finalize, then leave R
