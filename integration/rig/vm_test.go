package rig

import (
	"testing"
	"time"

	"github.com/vhostd/vhostd/internal/testmain"
)

// TestVMWithQEMUsOwnTap tries the rig itself, without vhostd.
func TestVMWithQEMUsOwnTap(t *testing.T) {
	testmain.NeedTun(t)
	image, err := BuildImage(t.TempDir())
	if err != nil {
		testmain.Skip(t, "%v", err)
	}
	ns, err := NewNamespace()
	if err != nil {
		t.Fatal(err)
	}
	defer ns.Close()
	vm, err := StartVM(t.TempDir(), image, VMConfig{Netdev: "tap,id=n0,ifname=tap0,script=no,downscript=no", Namespace: ns})
	if err != nil {
		t.Fatal(err)
	}
	defer vm.Close()
	ends := Ends{NS: ns, VM: vm, HostIP: "10.9.0.1", GuestIP: "10.9.0.2"}
	if err := ns.ConfigureTap("tap0", ends.HostIP+"/24", 0, time.Second); err != nil {
		t.Fatal(err)
	}
	if _, err := vm.Boot(); err != nil {
		t.Fatal(err)
	}
	if _, err := vm.SetUp(ends.GuestIP + "/24"); err != nil {
		t.Fatal(err)
	}
	if ping, err := ends.Ping(1472, 3); err != nil || ping.Received != 3 {
		t.Fatalf("%+v %v", ping, err)
	}
	sent, received, err := ends.Stream(16<<20, 7, false, time.Minute)
	if err != nil || sent.SHA256 != received.SHA256 || received.Bytes != 16<<20 {
		t.Fatalf("sent %+v, received %+v, %v", sent, received, err)
	}
	if err := vm.Quit(); err != nil {
		t.Fatal(err)
	}
}
