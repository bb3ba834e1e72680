// Package worker runs queue pairs on locked operating-system threads.
//
// A [Loop] is one thread with one epoll set. It owns the tasks added to it: no
// other goroutine touches a task's state. Control (session, API) reaches a task
// only through [Loop.Do] and [Loop.DoFor], which execute a function on the loop's
// thread between two turns and return when it has run.
//
// A task alternates between two states. Active: Run is called turn after turn,
// every turn bounded, so tasks of one loop share it fairly. Idle: after a turn
// without progress the task arms its notifications and is left alone until one of
// its watched descriptors becomes ready, a deadline passes, or control touches it.
package worker
