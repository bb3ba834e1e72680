package layercheck

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

const module = "github.com/vhostd/vhostd"

// all stands for every package of the module.
const all = "*"

// allowed names what the package in a folder may import of ours. The longest folder counts, so port covers port/tap. A name covers
// the folders below it, except that port stands for the interface alone. What a package has below itself it may import too, and what
// is internal to its tree.
var allowed = map[string][]string{
	"virtio":             {},
	"guestmem":           {"virtio"},
	"virtqueue":          {"guestmem", "virtio"},
	"pagemem":            {},
	"fragalloc":          {"pagemem"},
	"pool":               {"pagemem"},
	"packet":             {"pagemem", "virtio"},
	"offload":            {"packet", "virtio", "pagemem"},
	"port":               {"port", "packet", "pool", "fragalloc", "pagemem", "offload", "virtio"},
	"worker":             {"pagemem"},
	"vhostuser":          {"guestmem", "virtqueue", "virtio"},
	"vhostuser/frontend": {"vhostuser", "guestmem", "virtqueue", "virtio"},
	"virtionet":          {"virtio", "guestmem", "virtqueue", "pagemem", "fragalloc", "pool", "packet", "offload", "port", "worker", "vhostuser"},
	"bench":              {all},
	"cmd":                {all},
	"integration":        {all},
	"scripts":            {},
	"internal":           {},
	"internal/config":    {all},
	"internal/control":   {all},
	"internal/daemon":    {all},
	"internal/network":   {all},
	"internal/uplink":    {"port", "packet", "pool", "fragalloc", "pagemem", "offload", "virtio", "worker"},
	"internal/bench":     {all},
	"internal/attach":    {all},
}

// helpers may be imported by anyone: small wrappers that import nothing of ours.
func helper(folder string) bool {
	return strings.HasPrefix(folder, "internal/") && allowed[folder] == nil
}

type source struct {
	folder, name string // relative to the module's root
	file         *ast.File
	positions    *token.FileSet
}

func (s source) test() bool { return strings.HasSuffix(s.name, "_test.go") }

func TestImports(t *testing.T) {
	for _, s := range sources(t) {
		if s.test() {
			continue // tests may build on anything above the package that does not import it
		}
		for _, imported := range s.file.Imports {
			target, ours := strings.CutPrefix(strings.Trim(imported.Path.Value, `"`), module+"/")
			if ours && !mayImport(s.folder, target) {
				t.Errorf("%s imports %s; %s may import %v of this module", filepath.Join(s.folder, s.name), target, rule(s.folder), allowed[rule(s.folder)])
			}
		}
	}
}

// rule is the longest folder of the table that covers the given one.
func rule(folder string) string {
	for ; folder != "."; folder = path.Dir(folder) {
		if _, ok := allowed[folder]; ok {
			return folder
		}
	}
	return folder
}

func mayImport(folder, target string) bool {
	for _, name := range allowed[rule(folder)] {
		if name == all || name == target || name != "port" && strings.HasPrefix(target, name+"/") {
			return true
		}
	}
	return strings.HasPrefix(target, folder+"/") || strings.HasPrefix(target, rule(folder)+"/internal/") || helper(target)
}

func TestEveryFolderHasARule(t *testing.T) {
	for _, s := range sources(t) {
		if s.folder != "." && rule(s.folder) == "." {
			t.Errorf("%s: no rule for its imports; add one here and in docs/design.md", s.folder)
		}
	}
}

// TestRuleTable tries the table itself.
func TestRuleTable(t *testing.T) {
	cases := []struct {
		folder, target string
		want           bool
	}{
		{"virtqueue", "guestmem", true}, {"virtqueue", "pool", false}, {"virtqueue/driver", "virtio", true},
		{"port/tap", "port", true}, {"port/tap", "port/null", false}, {"port/tap", "internal/ratelog", true},
		{"virtionet", "port", true}, {"virtionet", "port/tap", false}, {"virtionet", "vhostuser/frontend", true},
		{"virtio", "guestmem", false}, {"virtio", "internal/daemon", false}, {"cmd/vhostd", "port/tap", true},
		{"internal/ratelog", "virtio", false}, {"pool", "fragalloc", false},
	}
	for _, c := range cases {
		if got := mayImport(c.folder, c.target); got != c.want {
			t.Errorf("%s imports %s: %v, expected %v", c.folder, c.target, got, c.want)
		}
	}
}

// TestUnsafe wants unsafe code only in *_unsafe.go, and a SAFETY line before each use of unsafe in a function.
func TestUnsafe(t *testing.T) {
	for _, s := range sources(t) {
		name := filepath.Join(s.folder, s.name)
		if !slices.ContainsFunc(s.file.Imports, func(i *ast.ImportSpec) bool { return i.Path.Value == `"unsafe"` }) {
			continue
		}
		if !strings.HasSuffix(strings.TrimSuffix(s.name, "_test.go"), "_unsafe") && !unsafeName(s.name) {
			t.Errorf("%s imports unsafe; only files named *_unsafe.go may", name)
		}
		for _, declaration := range s.file.Decls {
			if function, ok := declaration.(*ast.FuncDecl); ok && function.Body != nil {
				checkFunction(t, name, s, function)
			}
		}
	}
}

// unsafeName accepts also a build constraint after the mark, as in copy_unsafe_amd64.go.
func unsafeName(name string) bool {
	stem := strings.TrimSuffix(strings.TrimSuffix(name, ".go"), "_test")
	return strings.HasSuffix(stem, "_unsafe") || strings.Contains(stem, "_unsafe_")
}

// checkFunction wants a comment with SAFETY: between the start of the function's comment and each use of unsafe.Pointer and the
// functions that make slices, strings and pointers of it. Sizes and offsets are no accesses.
func checkFunction(t *testing.T, name string, s source, function *ast.FuncDecl) {
	start := function.Pos()
	if function.Doc != nil {
		start = function.Doc.Pos()
	}
	ast.Inspect(function.Body, func(node ast.Node) bool {
		selector, ok := node.(*ast.SelectorExpr)
		if !ok {
			return true
		}
		pkg, ok := selector.X.(*ast.Ident)
		if !ok || pkg.Name != "unsafe" || slices.Contains([]string{"Sizeof", "Offsetof", "Alignof"}, selector.Sel.Name) {
			return true
		}
		line := s.positions.Position(selector.Pos()).Line
		if !safetyBetween(s, s.positions.Position(start).Line, line) {
			t.Errorf("%s:%d: unsafe.%s without a SAFETY: line before it in %s", name, line, selector.Sel.Name, function.Name.Name)
		}
		return true
	})
}

func safetyBetween(s source, first, last int) bool {
	for _, group := range s.file.Comments {
		for _, comment := range group.List {
			line := s.positions.Position(comment.Pos()).Line
			if line >= first && line <= last && strings.Contains(comment.Text, "SAFETY:") {
				return true
			}
		}
	}
	return false
}

// TestAssembly wants every assembly file to say why its accesses are safe.
func TestAssembly(t *testing.T) {
	walk(t, ".s", func(name string, content []byte) {
		if !strings.Contains(string(content), "SAFETY:") {
			t.Errorf("%s has no SAFETY: line", name)
		}
	})
}

func sources(t *testing.T) (list []source) {
	t.Helper()
	walk(t, ".go", func(name string, content []byte) {
		positions := token.NewFileSet()
		file, err := parser.ParseFile(positions, name, content, parser.ParseComments)
		if err != nil {
			t.Fatal(err)
		}
		list = append(list, source{folder: filepath.Dir(name), name: filepath.Base(name), file: file, positions: positions})
	})
	return list
}

// walk visits the module's files with the extension; hidden folders and build results are left out.
func walk(t *testing.T, extension string, visit func(name string, content []byte)) {
	t.Helper()
	root := os.DirFS("../..")
	err := fs.WalkDir(root, ".", func(name string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if entry.IsDir() {
			if name != "." && (strings.HasPrefix(entry.Name(), ".") || slices.Contains([]string{"bin", "build", "testdata"}, entry.Name())) {
				return fs.SkipDir
			}
			return nil
		}
		if filepath.Ext(name) != extension {
			return nil
		}
		content, err := fs.ReadFile(root, name)
		if err == nil {
			visit(name, content)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}
