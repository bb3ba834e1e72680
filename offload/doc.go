// Package offload does in software what a receiver of frames did not negotiate:
// it finishes checksums that the sender left partial, and cuts large TCP and UDP
// frames into segments.
//
// A frame that a guest transmitted may be marked by its virtio-net header
// (VIRTIO 1.2, 5.1.6.2): NEEDS_CSUM asks for the sum from csum_start on, and a
// gso_type asks for segmentation. [Check] judges the marks against the real
// frame, once, where the frame enters. [Needs] decides per receiver whether the
// frame may pass as it is, and [Finisher.Finish] turns it into frames that may.
//
// Fragments can be shared by several receivers, so nothing here writes to them:
// what changes is copied, the rest is passed on. Parsing works on a private copy
// of the headers. Cost is bounded by the frame: at most [MaxSegments] segments,
// each byte copied and summed at most once.
package offload
